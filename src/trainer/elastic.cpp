#include "elastic.hpp"

#include <ATen/ops/empty.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <utility>

#include "option_pairs.hpp"
#include "ranks/gather.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

int64_t steps_done(const std::optional<RunState>& state) {  // gives a comparable number; -1: there is no state
  return state ? (static_cast<int64_t>(state->epochs) << 32) + state->steps : -1;
}

at::Tensor empty_of(const json& shape, const c10::Device& device) {
  const auto type = static_cast<at::ScalarType>(shape.at("type").get<int>());
  return at::empty(shape.at("sizes").get<std::vector<int64_t>>(), at::TensorOptions(device).dtype(type));
}

}  // namespace

void check_elastic(const TrainOptions& options) {
  check_pairs({.options = options, .is_elastic = true});
}

void hand_over(std::optional<RunState>& state, Rank& rank) {
  const at::Tensor positions = of_all_ranks(rank, {steps_done(state)}).select(1, 0);
  const auto farthest = positions.max().item<int64_t>();
  if (positions.min().item<int64_t>() == farthest) return;
  int source = 0;
  while (positions[source].item<int64_t>() != farthest) ++source;

  json shapes = json::array();
  if (rank.index() == source) {
    for (const auto& [name, tensor] : state->tensors) {
      const auto type = static_cast<int>(tensor.scalar_type());
      shapes.push_back({{"name", name}, {"type", type}, {"sizes", tensor.sizes().vec()}});
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
  if (steps_done(state) < farthest) state = std::move(theirs);
  rank.barrier();  // waits until all have the state
}

}  // namespace lockstep
