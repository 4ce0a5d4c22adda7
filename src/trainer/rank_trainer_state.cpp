// What a RankTrainer puts into a checkpoint and goes on from.
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/power_sgd.hpp>

#include "data_parallel/averaging.hpp"
#include "models/module_state.hpp"
#include "optim/optimizer_state.hpp"
#include "rank_trainer.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_generators.hpp"
#include "split/split_optimizer_state.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace lockstep {
namespace {

// Of each tensor, what all ranks have of it: a row for each rank.
io::NamedTensors tables_of_all_ranks(const io::NamedTensors& mine, Rank& rank) {
  io::NamedTensors tables;
  for (const auto& [name, tensor] : mine) tables.emplace_back(name, rank.allgather(tensor.to(rank.device())));
  return tables;
}

// Whatever the digest says, a table is believed only as far as its shape goes.
void check_tables(const RunState& state) {
  bool has_totals = false;
  for (const auto& [name, table] : tensors_under("ranks", state.tensors)) {
    const auto is = [&, &table = table](int64_t dimensions, at::ScalarType type) {
      return table.dim() == dimensions && table.scalar_type() == type;
    };
    if (name == "totals") has_totals = true;
    const bool fits = name == "totals"  ? is(2, at::kDouble) && table.size(1) == 4
                      : name == "rng"   ? is(2, at::kByte)
                      : name == "order" ? is(2, at::kLong)
                                        : table.dim() > 0;
    if (fits && table.size(0) > 0) continue;
    throw Error("cannot go on: the checkpoint's tensor 'ranks." + name + "' is no table with a row for each rank");
  }
  if (state.steps > 0 && !has_totals) {
    throw Error("cannot go on: the checkpoint is of within an epoch, and lacks the tensor 'ranks.totals'");
  }
}

// None of more samples than the epoch's steps have had.
int64_t left_out_of(const RunState& state, int64_t trained) {
  for (const auto& [name, tensor] : tensors_under("trainer", state.tensors)) {
    if (name != "left_out") continue;
    const bool is_number = tensor.numel() == 1 && tensor.scalar_type() == at::kLong;
    const int64_t value = is_number ? tensor.item<int64_t>() : -1;
    if (value >= 0 && value <= trained) return value;
    throw Error("cannot go on: the checkpoint's tensor 'trainer.left_out' is no count of the epoch's samples so far");
  }
  return 0;
}

}  // namespace

RunState RankTrainer::state() {
  RunState state;
  state.steps = steps_;
  state.seconds = steps_ == 0 ? 0 : seconds_;
  put_under("model", state_of(*whole()), state.tensors);
  if (auto* const sharded = update_.sharded()) put_under("optimizer", sharded->state(), state.tensors);
  if (auto* const optimizer = update_.optimizer(); optimizer && !local_) {
    put_under("optimizer", whole_optimizer_state(*optimizer, net_), state.tensors);
  }
  put_communication(state);
  put_order(state);
  state.tensors.emplace_back("ranks.rng", generators_of_all_ranks(rank_));
  if (steps_ == 0) return state;
  if (left_out_ > 0) state.tensors.emplace_back("trainer.left_out", at::tensor(left_out_, at::kLong));
  const torch::Tensor totals = of_all_ranks(
      rank_, {bits_of(totals_.loss.item<double>()), bits_of(static_cast<double>(totals_.correct.item<int64_t>())),
              bits_of(static_cast<double>(samples_)), bits_of(waited_)});
  state.tensors.emplace_back("ranks.totals", totals.view(torch::kDouble));
  if (!holds_whole()) return state;
  // Within an epoch BatchNorm's running statistics are each rank's own.
  io::NamedTensors buffers;
  for (const auto& item : net_.module()->named_buffers()) buffers.emplace_back(item.key(), item.value());
  put_under("ranks.buffers", tables_of_all_ranks(buffers, rank_), state.tensors);
  return state;
}

// With LocalSgd each rank's optimizer has a state of its own; with PowerSGD each rank has left out something else.
void RankTrainer::put_communication(RunState& state) {
  if (auto* const optimizer = update_.optimizer(); optimizer && local_) {
    put_under("ranks.optimizer", tables_of_all_ranks(optimizer_state(*optimizer, parameters()), rank_), state.tensors);
  }
  if (local_) {
    const auto momentum = local_->momentum();
    const auto named = parameters();
    for (size_t i = 0; i < momentum.size(); ++i) state.tensors.emplace_back("outer." + named[i].first, momentum[i]);
  }
  if (const auto* const power_sgd = dynamic_cast<const PowerSgdHook*>(hook_.get())) {
    put_under("ranks.error", tables_of_all_ranks(power_sgd->errors(), rank_), state.tensors);
    put_under("query", power_sgd->queries(), state.tensors);
  }
}

// The order in which the gradients lie in their buckets is learnt once. Where Gloo or NCCL add, it is part of what the
// next step's bits depend on.
void RankTrainer::put_order(RunState& state) {
  auto order = net_.replicas().replica()->learnt_order();
  const torch::Tensor longest = at::tensor(static_cast<int64_t>(order.size()), at::kLong).to(rank_.device());
  rank_.allreduce(longest, c10d::ReduceOp::MAX);
  if (longest.item<int64_t>() == 0) return;
  order.resize(static_cast<size_t>(longest.item<int64_t>()), -1);
  state.tensors.emplace_back("ranks.order", of_all_ranks(rank_, order));
}

// Of a run that was split otherwise, ranks that are now replicas may have learnt different ones.
void RankTrainer::restore_order(const torch::Tensor& table) {
  torch::Tensor order = table[rank_.index()].to(rank_.device(), torch::kLong, /*non_blocking=*/false, /*copy=*/true);
  net_.mesh().data().broadcast(order);
  order = order.cpu();
  net_.replicas().replica()->set_learnt_order(
      {order.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>() + order.numel()});
}

void RankTrainer::restore_communication(const RunState& state) {
  if (auto* const optimizer = update_.optimizer(); optimizer && local_) {
    io::NamedTensors mine;
    for (const auto& [name, table] : tensors_under("ranks.optimizer", state.tensors)) {
      if (table.size(0) != rank_.world_size()) {
        throw Error("cannot go on: with `sync_every` each rank's optimizer has a state of its own, and the run had " +
                    std::to_string(table.size(0)) + " ranks, this one has " + std::to_string(rank_.world_size()) +
                    "; give as many `devices`");
      }
      mine.emplace_back(name, table[rank_.index()]);
    }
    load_optimizer_state(*optimizer, parameters(), mine);
  }
  if (const auto outer = tensors_under("outer", state.tensors); local_ && !outer.empty()) {
    const std::map<std::string, torch::Tensor> by_name(outer.begin(), outer.end());
    std::vector<torch::Tensor> momentum;
    for (const auto& [name, parameter] : parameters()) {
      const auto found = by_name.find(name);
      if (found == by_name.end()) throw Error("cannot go on: the checkpoint has no outer momentum of " + name);
      momentum.push_back(found->second);
    }
    local_->set_momentum(momentum);
  }
  if (auto* const power_sgd = dynamic_cast<PowerSgdHook*>(hook_.get())) {
    io::NamedTensors errors;
    for (const auto& [name, table] : tensors_under("ranks.error", state.tensors)) {
      // Their mean is what counts, for other ranks.
      errors.emplace_back(name, table.size(0) == rank_.world_size() ? table[rank_.index()] : table.mean(0));
    }
    power_sgd->load(errors, tensors_under("query", state.tensors), rank_.device());
  }
}

io::NamedTensors RankTrainer::parameters() const {
  io::NamedTensors parameters;
  for (const auto& item : net_.module()->named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

// Sums over the ranks are what counts, so other ranks than the checkpoint's go on from one rank's share; their running
// statistics are then all rank 0's, as the network's in the checkpoint.
void RankTrainer::restore(const RunState& state) {
  const torch::NoGradGuard no_grad;
  check_tables(state);
  steps_ = state.steps;
  seconds_ = state.seconds;
  restore_communication(state);
  const auto theirs = tensors_under("optimizer", state.tensors);
  if (auto* const sharded = update_.sharded()) sharded->load_state(theirs);
  if (auto* const optimizer = update_.optimizer(); optimizer && !local_) {
    load_whole_optimizer_state(*optimizer, net_, theirs);
  }
  auto buffers = net_.module()->named_buffers();
  for (const auto& [name, table] : tensors_under("ranks.buffers", state.tensors)) {
    if (!holds_whole() || table.size(0) != rank_.world_size()) continue;
    const torch::Tensor mine = table[rank_.index()];
    torch::Tensor* const buffer = buffers.find(name);
    if (buffer == nullptr || buffer->sizes() != mine.sizes()) {
      throw Error("cannot go on: the checkpoint's tensor 'ranks.buffers." + name + "' is no buffer of this network");
    }
    buffer->copy_(mine);
  }
  left_out_ = left_out_of(state, std::min(train_.size(), steps_ * global_batch(options_)));
  for (const auto& [name, table] : tensors_under("ranks", state.tensors)) {
    const bool same_ranks = table.size(0) == rank_.world_size();
    if (name == "rng" && same_ranks) set_generator(rank_, table);
    if (name == "order" && same_ranks) restore_order(table);
    if (name != "totals") continue;
    if (!same_ranks && rank_.index() != 0) continue;
    const torch::Tensor mine = same_ranks ? table[rank_.index()] : table.sum(0);
    totals_.loss.fill_(mine[0].item<double>());
    totals_.correct.fill_(static_cast<int64_t>(mine[1].item<double>()));
    samples_ = static_cast<int64_t>(mine[2].item<double>());
    waited_ = same_ranks ? mine[3].item<double>() : table.select(1, 3).max().item<double>();
  }
}

}  // namespace lockstep
