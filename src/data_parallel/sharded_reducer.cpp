#include "sharded_reducer.hpp"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "flat_view.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/rank_wait.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace lockstep {
namespace {

constexpr int kComparedOnGpu = 3;    // first steps
constexpr int kUnusedAverages = 10;  // that say that step() is never called: more than one step adds up

// A filler has its parameter's shape, and its rows overlap: they begin one value apart. So that of a matrix takes the
// memory of a row and a column. (LibTorch refuses to change a tensor whose values are all in one place.)
int64_t memory_of_filler(const at::Tensor& parameter) {
  int64_t values = 1;
  for (const int64_t size : parameter.sizes()) values += size - 1;
  return values;
}

// A value above every norm to which gradients are clipped, and far from real gradients.
double filler_of(at::ScalarType type) {
  return type == at::kHalf ? 65504 : 1e30;
}

}  // namespace

ShardedReducer::ShardedReducer(const std::vector<ShardedBucket>& buckets, const Rank& rank,
                               const ShardedOptions& options, std::shared_ptr<DividedParameters> divided)
    : GradientBuckets(rank, "ShardedOptimizer", "reduce_scatter", options.overlap || divided),
      options_(options),
      divided_(std::move(divided)) {
  for (const auto& parameters : buckets) {
    Bucket bucket;
    for (const auto& place : parameters.places) {
      bucket.slots.push_back(slots_.size());
      add_slot(place.name, place.parameter);
      slots_.back().bucket = buckets_.size();
      places_.push_back(place);
    }
    buckets_.push_back(std::move(bucket));
    reductions_.push_back({.parameters = parameters, .gradient = at::zeros_like(parameters.slice)});
  }
  order_.resize(buckets_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  learnt_ = buckets_.size() < 2;
  if (!keeps_whole()) return;
  for (const size_t bucket : order_) take_memory(bucket);
}

// ---- Gradients and their memory.

// All of it is sent, also what belongs to no parameter. So it begins as zeros. (Not zeros_like(): that is an operator
// on the parameters, which stage 3 would gather.)
void ShardedReducer::take_memory(size_t index) {
  if (divided_) complete();
  Reduction& reduction = reductions_[index];
  const at::Tensor& values = reduction.parameters.values;
  reduction.memory = at::zeros(values.sizes(), values.options());
  for (const size_t slot : buckets_[index].slots) {
    slots_[slot].view = ShardedBucket::view(places_[slot], reduction.memory);
  }
}

// Nobody reads it any more, but other ranks may still have a tensor of it, by their handles of the finished call.
void ShardedReducer::give_memory(size_t index) {
  Reduction& reduction = reductions_[index];
  for (const size_t slot : buckets_[index].slots) slots_[slot].view.reset();
  reduction.memory.storage().unsafeGetStorageImpl()->reset();
  reduction.memory.reset();
}

// With stage 1 .grad is the view, and grows there. With stage 2 .grad is gone afterwards.
void ShardedReducer::collect(size_t index) {
  const c10::AutoGradMode no_grad(false);
  Slot& slot = slots_[index];
  if (!slot.view.defined()) take_memory(slot.bucket);
  auto& gradient = slot.parameter.mutable_grad();
  const bool grows = !keeps_whole() && slot.ready;  // by a backward inside the backward
  slot.had = slot.had || gradient.defined();
  if (!gradient.defined()) {
    if (!grows) slot.view.zero_();
  } else {
    refuse_sparse(slot);
    if (grows) {
      slot.view.add_(gradient);
    } else if (!same_memory(gradient, slot.view)) {
      slot.view.copy_(gradient);
    }
  }
  if (keeps_whole()) {
    gradient = slot.view;
  } else {
    gradient.reset();
  }
}

void ShardedReducer::zero_grad() {
  const std::lock_guard lock(mutex_);
  const c10::NoGradGuard no_grad;
  forget_left();
  for (auto& slot : slots_) {
    slot.parameter.mutable_grad().reset();
    slot.used = false;
  }
  for (auto& reduction : reductions_) reduction.adds = false;
  averaged_ = false;
  used_slot_ = kNone;
}

// variable_data: not a view for autograd, of which an optimizer's zero_grad() could not call detach_().
at::Tensor ShardedReducer::gradient_of(size_t slot) const {
  const auto& mine = places_[slot].piece;
  if (!slots_[slot].used || mine.size == 0) return {};
  return reductions_[slots_[slot].bucket].gradient.narrow(0, mine.in_slice, mine.size).variable_data();
}

std::vector<at::Tensor> ShardedReducer::gradients() {
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> gradients;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (places_[slot].piece.size > 0) gradients.push_back(gradient_of(slot));
  }
  return gradients;
}

std::vector<std::pair<std::string, at::Tensor>> ShardedReducer::slices() {
  const std::lock_guard lock(mutex_);
  check_averaged();
  std::vector<std::pair<std::string, at::Tensor>> pieces;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const at::Tensor gradient = gradient_of(slot);
    if (gradient.defined()) pieces.emplace_back(slots_[slot].name, gradient);
  }
  return pieces;
}

void ShardedReducer::check_averaged() const {
  if (averaged_) return;
  throw Error(name() + ": there are no averaged gradients to step with. Call DataParallel's loss(…).backward(), " +
              "outside of no_sync(), before each step()");
}

void ShardedReducer::use() {
  const std::lock_guard lock(mutex_);
  check_averaged();
  check_unchanged();
  was_used_ = true;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const auto& mine = places_[slot].piece;
    if (mine.size > 0) mine.values.mutable_grad() = gradient_of(slot);
    if (mine.size > 0 && slots_[slot].used) used_slot_ = slot;
  }
  if (keeps_whole()) return;
  averaged_ = false;
  for (auto& reduction : reductions_) reduction.adds = false;
}

int64_t ShardedReducer::columns_of(size_t bucket) const {
  return reductions_[bucket].parameters.values.numel();
}

at::Tensor ShardedReducer::view_in(size_t slot, const at::Tensor& flat) const {
  return ShardedBucket::view(places_[slot], flat);
}

// ---- A backward.

void ShardedReducer::listen(bool last) {
  GradientBuckets::listen(last);
  if (!last) take_filler_away();  // what comes adds to .grad
}

void ShardedReducer::before_grains() {
  check_kind(/*by_grains=*/true);
  forget_left();
}

void ShardedReducer::check_kind(bool by_grains) const {
  if (!averaged_ || of_grains_ == by_grains) return;
  throw Error(name() +
              ": gradients of batches with a grain and without one cannot add up; call zero_grad() between them");
}

// The optimizer of the slices knows nothing of the whole gradients, to which stage 1 adds.
void ShardedReducer::check_zero_grad() const {
  if (!keeps_whole() || used_slot_ == kNone) return;
  if (places_[used_slot_].piece.values.grad().defined() || !slots_[used_slot_].parameter.grad().defined()) return;
  throw Error(name() +
              ": optimizer().zero_grad() was called, which drops the gradients of this rank's slices alone, so that "
              "those of all steps would add up. Call zero_grad() of the ShardedOptimizer itself");
}

void ShardedReducer::before_backward() {
  check_zero_grad();
  check_kind(by_grains());
  for (auto& slot : slots_) slot.adds = slot.used && reductions_[slot.bucket].adds;
  forget_left();
}

void ShardedReducer::rethrow_failure() const {
  if (divided_) divided_->rethrow_failure();
}

// With stage 2 this waits, inside backward, for the bucket before. Otherwise a rank that is far ahead of the others
// would keep all of its gradients.
void ShardedReducer::post(size_t index) {
  if (!keeps_whole() && !open_.empty()) complete_oldest();
  const c10::AutoGradMode no_grad(false);
  Reduction& reduction = reductions_[index];
  open_.push_back(index);
  reduction.average = reduction.adds ? at::empty_like(reduction.gradient) : reduction.gradient;
  if (by_grains()) {
    const HookRound round = post_average_of_grains(index, reduction.average);
    reduction.work = round.work;
    reduction.finish = round.finish;
    return;
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  reduction.work = rank_.backend()._reduce_scatter_base(reduction.average, reduction.memory, options);
  if (one_by_one()) complete_oldest();
}

// On GPUs a work that is found complete would make backward's stream wait for it. NCCL needs no polling.
void ShardedReducer::poll() {
  if (!rank_.device().is_cpu()) return;
  for (const size_t index : open_) {
    if (reductions_[index].work) reductions_[index].work->isCompleted();
  }
}

void ShardedReducer::leave_open() {
  for (const size_t index : std::exchange(open_, {})) {
    if (queues_calls_) wait_on_stream(reductions_[index].work);
  }
}

void ShardedReducer::complete() {
  while (!open_.empty()) complete_oldest();
}

void ShardedReducer::complete_oldest() {
  const c10::AutoGradMode no_grad(false);
  const size_t index = open_.front();
  Reduction& reduction = reductions_[index];
  if (reduction.work) reduction.work->wait();
  open_.pop_front();
  reduction.work.reset();
  buckets_[index].range.reset();
  if (reduction.finish) std::exchange(reduction.finish, {})();
  if (reduction.adds) reduction.gradient.add_(reduction.average);
  reduction.average.reset();
  if (keeps_whole() && !by_grains()) return;
  reduction.adds = true;
  by_grains() ? buckets_[index].sums->release() : give_memory(index);
}

void ShardedReducer::after_backward(bool partial) {
  averaged_ = !partial;
  of_grains_ = by_grains();
  note_left();
  if (!partial) warn_without_steps();
}

void ShardedReducer::warn_without_steps() {
  if (was_used_ || rank_.index() != 0 || ++unused_ != kUnusedAverages) return;
  comm::RankPlace::of(rank_).warn("ShardedOptimizer: gradients were averaged " + std::to_string(kUnusedAverages) +
                                  " times, and step() was never called, so nothing was trained. Call step() of the "
                                  "ShardedOptimizer itself: optimizer().step() has no gradients");
}

// By when rank 0 completed them; those that it did not complete come last.
void ShardedReducer::follow(const std::vector<size_t>& order) {
  std::vector<size_t> completed(buckets_.size(), 0), missing(buckets_.size());
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) missing[bucket] = buckets_[bucket].slots.size();
  for (size_t place = 0; place < order.size(); ++place) {
    const size_t bucket = slots_[order[place]].bucket;
    completed[bucket] = place;
    --missing[bucket];
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (missing[bucket] > 0) completed[bucket] = std::numeric_limits<size_t>::max();
  }
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return completed[a] < completed[b]; });
}

// ---- What is left in .grad between a backward and the step.

// On a GPU the host would wait for what it compares. So there it does so in the first steps only.
void ShardedReducer::note_left() {
  if (keeps_whole() && !by_grains()) {
    for (const auto& slot : slots_) versions_left_.push_back(slot.view._version());
  }
  if (!rank_.device().is_cpu() && ++compared_ > kComparedOnGpu) return;
  filled_ = !keeps_whole() || by_grains();
  const c10::AutoGradMode no_grad(false);
  std::vector<size_t> used;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].used && slots_[slot].parameter.numel() > 0) used.push_back(slot);
  }
  const auto cost = [&](size_t slot) {
    const at::Tensor& parameter = slots_[slot].parameter;
    return filled_ ? memory_of_filler(parameter) : parameter.numel();
  };
  std::stable_sort(used.begin(), used.end(), [&](size_t a, size_t b) { return cost(a) < cost(b); });
  for (const size_t slot : used) {
    if (filled_) {
      fill(slot);
    } else {
      left_ = slots_[slot].parameter.grad();
      if (!left_.any().item<bool>()) continue;  // zeros stay zeros, whoever scales them
      memory_left_ = left_;
    }
    slot_left_ = slot;
    values_left_ = memory_left_.clone();
    return;
  }
  left_.reset();
}

// Not by full_like(): that is an operator on the parameter, which stage 3 would gather.
void ShardedReducer::fill(size_t slot) {
  const at::Tensor& parameter = slots_[slot].parameter;
  memory_left_ = at::full({memory_of_filler(parameter)}, filler_of(parameter.scalar_type()),
                          parameter.options().requires_grad(false));
  const std::vector<int64_t> strides(parameter.sizes().size(), 1);
  left_ = memory_left_.as_strided(parameter.sizes(), strides).variable_data();
  parameter.mutable_grad() = left_;
}

void ShardedReducer::forget_left() {
  versions_left_.clear();
  if (!left_.defined()) return;
  auto& gradient = slots_[slot_left_].parameter.mutable_grad();
  if (filled_ && gradient.defined() && same_memory(gradient, left_)) gradient.reset();
  left_.reset();
  memory_left_.reset();
  values_left_.reset();
}

void ShardedReducer::take_filler_away() {
  const std::lock_guard lock(mutex_);
  forget_left();
}

// LibTorch's clipping bypasses the count, so there the values tell.
bool ShardedReducer::whole_gradients_changed() const {
  for (size_t slot = 0; slot < versions_left_.size(); ++slot) {
    if (slots_[slot].view._version() != versions_left_[slot]) return true;
  }
  return false;
}

void ShardedReducer::check_unchanged() {
  const at::Tensor memory = memory_left_, values = values_left_;
  const bool written = whole_gradients_changed();
  forget_left();
  if (!written && (!memory.defined() || same_values(memory, values))) return;
  throw Error(name() + ": .grad was changed between backward() and step(), which uses the averages that it has " +
              "elsewhere. Clip with lockstep::clip_grad_norm(optimizer, max_norm), whose norm is the whole network's; "
              "change what optimizer.gradients() gives for anything else");
}

}  // namespace lockstep
