// Writes RankTrainer's state into a checkpoint, and goes on from one.
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/power_sgd.hpp>

#include "base/number_text.hpp"
#include "data_parallel/replica.hpp"
#include "data_parallel/trained_net.hpp"
#include "nn/module_state.hpp"
#include "rank_trainer.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_wait.hpp"
#include "ranks/shared_generator.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {
namespace {

// Gives the number "trainer.NAME", which is the same for all ranks; none if there is no such tensor.
template <class Number>
std::optional<Number> trainers_own(const RunState& state, const std::string& name) {
  for (const auto& [theirs, tensor] : tensors_under("trainer", state.tensors)) {
    if (theirs != name) continue;
    if (tensor.numel() == 1 && tensor.scalar_type() == c10::CppTypeToScalarType<Number>::value)
      return tensor.template item<Number>();
    throw Error("cannot go on: the checkpoint's tensor 'trainer." + name + "' is not one number", {Error::file});
  }
  return std::nullopt;
}

// Checks that no more samples were left out than the epoch's steps have had.
int64_t left_out_of(const RunState& state, int64_t trained) {
  const int64_t value = trainers_own<int64_t>(state, "left_out").value_or(0);
  if (value >= 0 && value <= trained) return value;
  throw Error("cannot go on: the checkpoint's tensor 'trainer.left_out' is no count of the epoch's samples so far",
              {Error::file});
}

// Gives the loss of the epoch's steps so far, in a run with a grain.
double grains_loss_of(const RunState& state) {
  if (const auto loss = trainers_own<double>(state, "loss")) return *loss;
  throw Error("cannot go on: the checkpoint has no 'trainer.loss', the sum of the epoch's losses so far",
              {Error::file});
}

}  // namespace

RunState RankTrainer::state() {
  RunState state;
  save_average(state);
  if (!all_parameters_) all_parameters_.emplace(update_.part());
  state.steps = steps_;
  state.seconds = steps_ == 0 ? 0 : clock_.seconds();
  put_under("model", state_of(*whole()), state.tensors);
  update_.save(state, rank_);
  save_hook(state);
  save_order(state);
  state.tensors.emplace_back("ranks.rng", generators_of_all_ranks(rank_));
  if (steps_ == 0) return state;
  if (totals_.left_out > 0) state.tensors.emplace_back("trainer.left_out", at::tensor(totals_.left_out, at::kLong));
  if (options_.batch.grain) {
    state.tensors.emplace_back("trainer.loss", at::tensor(totals_.grain_losses.sum(rank_), at::kDouble));
  }
  std::vector<int64_t> row;
  for (const double number : totals_.save()) row.push_back(bits_of(number));
  row.push_back(bits_of(clock_.waited()));
  state.tensors.emplace_back("ranks.totals", of_all_ranks(rank_, row).view(torch::kDouble));
  if (!holds_whole()) return state;
  // Within an epoch BatchNorm's running statistics are each rank's own.
  io::NamedTensors buffers;
  for (const auto& item : update_.part()->module().named_buffers()) buffers.emplace_back(item.key(), item.value());
  put_under("ranks.buffers", tables_of_all_ranks(buffers, rank_), state.tensors);
  return state;
}

void RankTrainer::be_elastic(const std::stop_token& newer) {
  regrouping_.emplace(rank_, newer);
  totals_.shared = true;
  whole_steps_ = steps_;
}

// Each rank's own state has one row here, which a later generation's rank 0 takes.
RunState RankTrainer::whole_steps() {
  RunState state;
  state.steps = whole_steps_;
  if (is_within_step_) {
    const torch::NoGradGuard no_grad;
    const auto buffers = update_.part()->module().buffers();
    for (size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(buffers_[i]);
  }
  save_average(state);
  put_under("model", state_of(*whole()), state.tensors);
  update_.save(state, rank_);
  drain(rank_);  // the next generation's ranks have other streams
  if (whole_steps_ == 0) return state;
  state.seconds = clock_.seconds();
  if (totals_.left_out > 0) state.tensors.emplace_back("trainer.left_out", at::tensor(totals_.left_out, at::kLong));
  state.tensors.emplace_back("trainer.loss", at::tensor(totals_.known.loss, at::kDouble));
  const int64_t samples = std::min(samples_of_epoch(), whole_steps_ * options_.batch.global()) - totals_.left_out;
  state.tensors.emplace_back("ranks.totals", at::tensor({totals_.known.loss, static_cast<double>(totals_.known.correct),
                                                         static_cast<double>(samples), clock_.waited()},
                                                        at::kDouble)
                                                 .view({1, 4}));
  return state;
}

void RankTrainer::save_average(RunState& state) {
  if (task_.ema_decay > 0) state.tensors.emplace_back("trainer.ema_decay", at::tensor(task_.ema_decay, at::kDouble));
  show();
  if (!shown_) return;  // every step so far was skipped
  for (const auto& item : whole()->named_parameters())
    state.tensors.emplace_back("ema." + item.key(), item.value().detach().clone());
  shown_.reset();
}

void RankTrainer::load_average(const RunState& state) {
  const auto values = tensors_under("ema", state.tensors);
  const double before = trainers_own<double>(state, "ema_decay").value_or(0);
  const bool has_steps = state.epochs > 0 || state.steps > 0;
  if (has_steps && before != task_.ema_decay) {
    throw Error("cannot go on: the checkpoint's run has ema_decay " + number_text(before) + ", and \"" + task_.name +
                    "\" has " + number_text(task_.ema_decay) + "; a run goes on as it began, so give it the same",
                {.options = {"ema_decay"}});
  }
  auto& average = update_.average();
  if (!average || values.empty()) return;
  const auto put_into = [&](const torch::nn::Module& net) {
    auto parameters = net.named_parameters();
    for (const auto& [name, value] : values) {
      at::Tensor* const parameter = parameters.find(name);
      if (parameter == nullptr || parameter->sizes() != value.sizes())
        throw Error("cannot go on: the checkpoint's tensor 'ema." + name + "' is no weight of this network",
                    {Error::file});
      parameter->copy_(value);
    }
  };
  average->add();  // keeps the weights, which come back when the average is no longer shown
  const auto shown = average->shown();
  if (holds_whole()) return put_into(*whole());
  MadeModule averages = task_.module(rank_, options_.seed);
  put_into(*averages.whole());
  const SplitModel slices(averages.layers, traffic_.rank(), split_of(options_, rank_.world_size()), {.average = false});
  const auto from = slices.trained()->replica()->module().parameters(), to = update_.part()->module().parameters();
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

// With PowerSGD each rank has an error of its own.
void RankTrainer::save_hook(RunState& state) {
  const auto* const power_sgd = dynamic_cast<const PowerSgdHook*>(hook_.get());
  if (power_sgd == nullptr) return;
  put_under("ranks.error", tables_of_all_ranks(power_sgd->errors(), rank_), state.tensors);
  put_under("query", power_sgd->queries(), state.tensors);
}

void RankTrainer::load_hook(const RunState& state) {
  auto* const power_sgd = dynamic_cast<PowerSgdHook*>(hook_.get());
  if (power_sgd == nullptr) return;
  io::NamedTensors errors;
  for (const auto& [name, table] : tensors_under("ranks.error", state.tensors)) {
    // Other ranks take the mean of all errors.
    errors.emplace_back(name, table.size(0) == rank_.world_size() ? table[rank_.index()] : table.mean(0));
  }
  power_sgd->load(errors, tensors_under("query", state.tensors), rank_.device());
}

// The order of gradients in their buckets is learnt once. If Gloo or NCCL add, the next step's bits depend on it.
void RankTrainer::save_order(RunState& state) {
  auto* const averaging = update_.part()->averaging();
  std::vector<int64_t> order;
  if (averaging) order = averaging->order();
  const torch::Tensor longest = at::tensor(static_cast<int64_t>(order.size()), at::kLong).to(rank_.device());
  rank_.allreduce(longest, c10d::ReduceOp::MAX);
  if (longest.item<int64_t>() == 0) return;
  order.resize(static_cast<size_t>(longest.item<int64_t>()), -1);
  state.tensors.emplace_back("ranks.order", of_all_ranks(rank_, order));
}

// If the run was split otherwise, ranks that are replicas now may have learnt different orders.
void RankTrainer::load_order(const torch::Tensor& table) {
  torch::Tensor order = table[rank_.index()].to(rank_.device(), torch::kLong, /*non_blocking=*/false, /*copy=*/true);
  net_.mesh().data().broadcast(order);
  order = order.cpu();
  auto* const averaging = update_.part()->averaging();
  if (!averaging) return;
  averaging->set_order({order.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>() + order.numel()});
}

// Only the sums over the ranks count. So on other ranks than the checkpoint's, rank 0 takes all of them.
void RankTrainer::load_totals(const torch::Tensor& table) {
  totals_.known.correct = static_cast<int64_t>(table.select(1, 1).sum().item<double>());
  const bool same_ranks = table.size(0) == rank_.world_size();
  if (!same_ranks && rank_.index() != 0) return;
  const torch::Tensor mine = same_ranks ? table[rank_.index()] : table.sum(0);
  totals_.load(mine);
  clock_.reset(clock_.seconds(), same_ranks ? mine[3].item<double>() : table.select(1, 3).max().item<double>());
}

// On other ranks than the checkpoint's, all take rank 0's running statistics, as the checkpoint's network has them.
void RankTrainer::load_buffers(const io::NamedTensors& tables) {
  auto buffers = update_.part()->module().named_buffers();
  for (const auto& [name, table] : tables) {
    if (!holds_whole() || table.size(0) != rank_.world_size()) continue;
    const torch::Tensor mine = table[rank_.index()];
    torch::Tensor* const buffer = buffers.find(name);
    if (buffer == nullptr || buffer->sizes() != mine.sizes()) {
      throw Error("cannot go on: the checkpoint's tensor 'ranks.buffers." + name + "' is no buffer of this network",
                  {Error::file});
    }
    buffer->copy_(mine);
  }
}

void RankTrainer::restore(const RunState& state) {
  const torch::NoGradGuard no_grad;
  check_tables(state);
  steps_ = state.steps;
  clock_.reset(state.seconds);
  update_.load(state, rank_);
  load_average(state);
  load_hook(state);
  load_buffers(tensors_under("ranks.buffers", state.tensors));
  totals_.left_out = left_out_of(state, std::min(samples_of_epoch(), steps_ * options_.batch.global()));
  if (options_.batch.grain && steps_ > 0) {
    totals_.known.loss = grains_loss_of(state);
    totals_.grain_losses.reset(totals_.known.loss);
  }
  for (const auto& [name, table] : tensors_under("ranks", state.tensors)) {
    if (name == "totals") load_totals(table);
    if (table.size(0) != rank_.world_size()) continue;
    if (name == "rng") set_generator(rank_, table);
    if (name == "order") load_order(table);
  }
}

}  // namespace lockstep
