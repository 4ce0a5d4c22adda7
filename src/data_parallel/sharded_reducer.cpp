#include "sharded_reducer.hpp"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "flat_view.hpp"
#include "ranks/rank_wait.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace lockstep {

ShardedReducer::ShardedReducer(const std::vector<ShardedBucket>& buckets, const Rank& rank,
                               const DataParallelOptions& options, std::shared_ptr<DividedParameters> divided)
    : GradientBuckets(rank, {.collective = "reduce_scatter",
                             .overlap = options.overlap || divided,
                             .in_slices = true,
                             .may_change_alone = !divided,
                             .check = options.grain_check}),
      options_(options),
      divided_(std::move(divided)) {
  for (const auto& parameters : buckets) {
    GradientSlots::Bucket bucket;
    bucket.columns = parameters.values.numel();
    for (const auto& place : parameters.places) {
      bucket.slots.push_back(slots_.size());
      add_slot(place.name, place.parameter);
      slots_.back().bucket = buckets_.size();
      slots_.back().offset = place.offset;
      places_.push_back(place);
    }
    buckets_.push_back(std::move(bucket));
    reductions_.push_back({.parameters = parameters, .gradient = at::zeros_like(parameters.slice)});
  }
  order_.resize(buckets_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  learnt_ = buckets_.size() < 2;
  if (!keeps_memory()) return;
  for (const size_t bucket : order_) {
    take_memory(bucket);
    buckets_[bucket].row = reductions_[bucket].memory;
  }
}

// ---- Gradients and their memory.

// Begins as zeros, since all of the memory is sent, also values that belong to no parameter. (zeros_like() would be an
// operator on the parameters, which Sharded::parameters would gather.)
void ShardedReducer::take_memory(size_t index) {
  if (divided_) complete_all();
  Reduction& reduction = reductions_[index];
  const at::Tensor& values = reduction.parameters.values;
  reduction.memory = at::zeros(values.sizes(), values.options());
  for (const size_t slot : buckets_[index].slots) {
    slots_[slot].view = view_in_flat(slots_[slot].parameter, reduction.memory, slots_[slot].offset);
  }
}

// Nobody reads the memory any more, but other ranks may still have a tensor of it, by handles of the finished call.
void ShardedReducer::give_memory(size_t index) {
  Reduction& reduction = reductions_[index];
  for (const size_t slot : buckets_[index].slots) slots_[slot].view.reset();
  reduction.memory.storage().unsafeGetStorageImpl()->reset();
  reduction.memory.reset();
}

void ShardedReducer::collect(size_t index) {
  const c10::AutoGradMode no_grad(false);
  GradientSlot& slot = slots_[index];
  if (!slot.view.defined()) take_memory(slot.bucket);
  auto& gradient = slot.parameter.mutable_grad();
  const bool grows = slot.ready;  // a backward inside the backward adds to it
  slot.had = slot.had || gradient.defined();
  if (!gradient.defined()) {
    if (!grows) slot.view.zero_();
  } else {
    slot.refuse_sparse(name());
    if (grows) {
      slot.view.add_(gradient);
    } else {
      slot.view.copy_(gradient);
    }
  }
  gradient.reset();
}

void ShardedReducer::zero_grad() {
  const std::lock_guard lock(mutex_);
  for (auto& slot : slots_) {
    slot.parameter.mutable_grad().reset();
    slot.used = false;
  }
  for (auto& reduction : reductions_) reduction.adds = false;
  averaged_ = false;
}

// variable_data makes no view for autograd: an optimizer's zero_grad() could not call detach_() of one.
at::Tensor ShardedReducer::gradient_of(size_t slot) const {
  const auto& mine = places_[slot].slice;
  if (!slots_[slot].used || mine.size == 0) return {};
  return reductions_[slots_[slot].bucket].gradient.narrow(0, mine.in_slice, mine.size).variable_data();
}

std::vector<std::pair<std::string, at::Tensor>> ShardedReducer::slices() {
  const std::lock_guard lock(mutex_);
  check_averaged();
  std::vector<std::pair<std::string, at::Tensor>> slices;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const at::Tensor gradient = gradient_of(slot);
    if (gradient.defined()) slices.emplace_back(slots_[slot].name, gradient);
  }
  return slices;
}

void ShardedReducer::check_averaged() const {
  if (averaged_) return;
  throw Error(name() + ": there are no averaged gradients to step with. Call loss(…).backward(), outside of " +
              "no_sync(), before each step() of the Optimizer");
}

void ShardedReducer::use() {
  const std::lock_guard lock(mutex_);
  check_averaged();
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].parameter.grad().defined()) {
      throw Error(name() + ": " + slots_[slot].name +
                  " has a gradient of a backward that was not averaged, behind the one that was. End each step with a "
                  "backward of net.loss() outside of no_sync()");
    }
    const auto& mine = places_[slot].slice;
    if (mine.size > 0) mine.values.mutable_grad() = gradient_of(slot);
  }
  averaged_ = false;
  for (auto& reduction : reductions_) reduction.adds = false;
}

// ---- A backward.

void ShardedReducer::begin(bool by_grains) {
  if (averaged_ && of_grains_ != by_grains) {
    throw Error(name() +
                ": gradients of batches with a grain and without one cannot add up; call zero_grad() between them");
  }
  of_grains_ = by_grains;
  for (auto& slot : slots_) slot.adds = slot.used && reductions_[slot.bucket].adds;
}

void ShardedReducer::rethrow_failure() const {
  if (divided_) divided_->rethrow_failure();
}

// From Sharded::gradients on this waits, inside backward, for the bucket before. Otherwise a rank that is far ahead of
// the others would keep all of its gradients.
void ShardedReducer::post(size_t index) {
  if (!keeps_memory() && !open_.empty()) complete_oldest();
  const c10::AutoGradMode no_grad(false);
  Reduction& reduction = reductions_[index];
  open_.push_back(index);
  reduction.average = reduction.adds ? at::empty_like(reduction.gradient) : reduction.gradient;
  if (by_grains()) {
    const CommunicationHook::Round round = terms_.post(index, reduction.average);
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
void ShardedReducer::move_on(bool may_wait) {
  while (next_is_ready()) post_next();
  if (may_wait || !rank_.device().is_cpu()) return;
  for (const size_t index : open_) {
    if (reductions_[index].work) reductions_[index].work->isCompleted();
  }
}

void ShardedReducer::abandon() {
  averaged_ = false;
  for (const size_t index : std::exchange(open_, {})) {
    if (queues_calls_) wait_on_stream(reductions_[index].work);
  }
}

void ShardedReducer::complete(bool partial) {
  complete_all();
  averaged_ = !partial;
}

void ShardedReducer::complete_all() {
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
  reduction.adds = true;
  if (by_grains()) {
    buckets_[index].sums->release();
  } else if (!keeps_memory()) {
    give_memory(index);
  }
}

// Orders buckets by when rank 0 completed them. Buckets that it did not complete come last.
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

}  // namespace lockstep
