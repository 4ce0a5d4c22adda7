#include "elastic.hpp"

#include <ATen/ops/empty.h>
#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "joined_pieces.hpp"
#include "ranks/gather.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

int64_t steps_done(const std::optional<RunState>& state) {  // comparable; -1: there is no state
  return state ? (static_cast<int64_t>(state->epochs) << 32) + state->steps : -1;
}

json shape_of(const at::Tensor& tensor) {
  return {{"type", static_cast<int>(tensor.scalar_type())}, {"sizes", tensor.sizes().vec()}};
}

at::Tensor empty_of(const json& shape, const c10::Device& device) {
  const auto type = static_cast<at::ScalarType>(shape.at("type").get<int>());
  return at::empty(shape.at("sizes").get<std::vector<int64_t>>(), at::TensorOptions(device).dtype(type));
}

// What this rank has of the state after so many updates.
std::vector<StatePiece> pieces_after(int64_t updates, const std::optional<RunState>& state) {
  if (!state) return {};
  if (state->updates == updates) return state->pieces;
  return state->updates + 1 == updates ? state->next_pieces : std::vector<StatePiece>();
}

}  // namespace

void check_elastic(const TrainOptions& options) {
  const auto refuse = [](const std::string& why) {
    throw Error("an elastic job goes on with fewer processes and with more, and " + why +
                "; or start the job as one that is not elastic");
  };
  if (options.batch.grain == 0) {
    refuse("without a `grain` the weights' bits depend on their number; give a `grain`, such as 32");
  }
  if (options.exchange.zero_stage == 3) {
    refuse(
        "with `zero_stage` 3 a slice of the parameters is lost with its device; take `zero_stage` 1 or 2 with "
        "`keep_twice`");
  }
  if (options.exchange.zero_stage > 0 && !options.exchange.keep_twice) {
    refuse("with `zero_stage` " + std::to_string(options.exchange.zero_stage) +
           " a slice of the optimizer's state is lost with its device. Give `keep_twice` too, and each slice is at two "
           "devices: each of N then keeps and updates 2/N of the optimizer, not 1/N, and in each step sends 1/N of the "
           "gradients' bytes more; or leave `zero_stage` out");
  }
  if (options.exchange.keep_twice && (options.devices.size() > 1 || !options.devices[0].is_cpu())) {
    refuse(
        "with `keep_twice` the devices of one process may keep the same slice, and are lost together; and on GPUs "
        "parameters may be under way when a process is lost; take `devices` cpu, which is one for each process");
  }
  if (options.split) refuse("with a `split` a part of the network is lost with its device; leave `split` out");
  if (options.batch.balance != BalanceRule()) {
    refuse("`balance` is of the devices that the run began with; leave `balance` out");
  }
  if (!options.keep.trace.empty()) refuse("a `trace` is of ranks that stay; leave `trace` out");
}

// A rank that was prepared for an update cannot know whether another one heard that all were.
void put_pieces(TwiceKept& kept, RunState& state) {
  io::NamedTensors parameters = state.tensors;
  state.in_pieces = true;
  state.pieces = kept.pieces("optimizer", state.tensors);
  state.updates = kept.updates();
  if (!kept.is_prepared()) return;
  kept.update_alone();
  state.next_pieces = kept.pieces("optimizer", parameters);
}

void hand_over(std::optional<RunState>& state, Rank& rank) {
  const bool is_in_pieces = state && state->in_pieces;
  const at::Tensor all = of_all_ranks(rank, {steps_done(state), is_in_pieces ? 1 : 0, state ? state->updates : 0});
  const at::Tensor positions = all.select(1, 0), in_pieces = all.select(1, 1);
  const auto farthest = positions.max().item<int64_t>();
  if (positions.min().item<int64_t>() == farthest && !in_pieces.any().item<bool>()) {
    if (state) state->updates = all[0][2].item<int64_t>();  // one from a checkpoint counts from 0
    return;
  }
  // All ranks begin alike, and of that one has no pieces that broke off before it had made them.
  if (farthest == 0 && in_pieces.any().item<bool>()) {
    state.reset();
    return;
  }
  int source = 0;
  while (positions[source].item<int64_t>() != farthest) ++source;
  // One of them may have all of it, from a generation that has not begun.
  for (int other = source; in_pieces[source].item<int64_t>() != 0 && other < rank.world_size(); ++other) {
    if (positions[other].item<int64_t>() == farthest && in_pieces[other].item<int64_t>() == 0) source = other;
  }

  json shapes = json::array();
  if (rank.index() == source) {
    for (const auto& [name, tensor] : state->tensors) {
      shapes.push_back(shape_of(tensor));
      shapes.back()["name"] = name;
    }
  }
  shapes = json::parse(shared_text(shapes.dump(), rank, source));
  RunState theirs = parse_manifest(shared_text(rank.index() == source ? manifest_of(*state) : "", rank, source));
  for (size_t i = 0; i < shapes.size(); ++i) {
    const at::Tensor tensor = rank.index() == source ? state->tensors[i].second.detach().to(rank.device()).contiguous()
                                                     : empty_of(shapes[i], rank.device());
    if (tensor.numel() > 0) rank.broadcast(tensor, source);
    theirs.tensors.emplace_back(shapes[i].at("name"), tensor);
  }
  theirs.updates = all[source][2].item<int64_t>();
  if (in_pieces[source].item<int64_t>() != 0) {
    for (auto& whole : joined_pieces(pieces_after(theirs.updates, state), rank))
      theirs.tensors.push_back(std::move(whole));
  }
  if (is_in_pieces || steps_done(state) < farthest) {
    state = std::move(theirs);
  } else {
    state->updates = theirs.updates;
  }
  rank.barrier();  // all have it
}

}  // namespace lockstep
