// Update's state: writes it into a checkpoint, and goes on from one.
#include <lockstep/base/error.hpp>

#include "optim/optimizer_state.hpp"
#include "rank_tables.hpp"
#include "update.hpp"

#include <map>
#include <string>
#include <vector>

namespace lockstep {

void Update::save(RunState& state, Rank& rank) {
  if (!local_) return put_under("optimizer", optimizer_.state(), state.tensors);
  const auto named = parameters();
  // Each rank has a state of its own.
  put_under("ranks.optimizer", tables_of_all_ranks(optimizer_state(optimizer_.inner(), named), rank), state.tensors);
  const auto momentum = local_->momentum();
  for (size_t i = 0; i < momentum.size(); ++i) state.tensors.emplace_back("outer." + named[i].first, momentum[i]);
}

void Update::load(const RunState& state, const Rank& rank) {
  if (local_) return load_of_ranks(state, rank);
  optimizer_.load_state(tensors_under("optimizer", state.tensors));
}

void Update::load_of_ranks(const RunState& state, const Rank& rank) {
  io::NamedTensors mine;
  for (const auto& [name, table] : tensors_under("ranks.optimizer", state.tensors)) {
    if (table.size(0) != rank.world_size()) {
      throw Error("cannot go on: with `sync_every` each rank's optimizer has a state of its own, and the run had " +
                      std::to_string(table.size(0)) + " ranks, this one has " + std::to_string(rank.world_size()) +
                      "; give as many `devices`",
                  {.options = {"devices"}});
    }
    mine.emplace_back(name, table[rank.index()]);
  }
  load_optimizer_state(optimizer_.inner(), parameters(), mine);
  const auto outer = tensors_under("outer", state.tensors);
  if (outer.empty()) return;
  const std::map<std::string, torch::Tensor> by_name(outer.begin(), outer.end());
  std::vector<torch::Tensor> momentum;
  for (const auto& [name, parameter] : parameters()) {
    const auto found = by_name.find(name);
    if (found == by_name.end())
      throw Error("cannot go on: the checkpoint has no outer momentum of " + name, {Error::file});
    momentum.push_back(found->second);
  }
  local_->set_momentum(momentum);
}

io::NamedTensors Update::parameters() const {
  io::NamedTensors parameters;
  for (const auto& item : part()->module().named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

}  // namespace lockstep
