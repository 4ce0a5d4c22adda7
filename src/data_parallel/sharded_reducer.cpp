#include "sharded_reducer.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "comm/purpose.hpp"
#include "flat_view.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace lockstep {
namespace {

constexpr int kComparedOnGpu = 3;  // first steps

constexpr int64_t kLargestFiller = 4096;  // values: it must cost no memory to speak of

// Above every norm to which gradients are clipped, and far from what gradients are.
double filler_of(at::ScalarType type) {
  return type == at::kHalf ? 65504 : 1e30;
}

}  // namespace

ShardedReducer::ShardedReducer(const std::vector<ShardedBucket>& buckets, Rank& rank, const ShardedOptions& options)
    : Averaging(rank.name() + ": ShardedOptimizer"),
      rank_(rank),
      options_(options),
      report_(rank, rank.name() + ": ShardedOptimizer"),
      order_(buckets.size()),
      learned_(buckets.size() < 2),
      alone_(rank, rank.name() + ": ShardedOptimizer") {
  std::iota(order_.begin(), order_.end(), size_t{0});
  for (const auto& parameters : buckets) {
    Bucket bucket{.parameters = parameters, .slots = {}, .gradient = at::zeros_like(parameters.slice)};
    for (const auto& place : parameters.places) {
      bucket.slots.push_back(slots_.size());
      slots_.push_back({.place = place, .bucket = buckets_.size()});
    }
    int64_t& largest = pieces_[parameters.values.scalar_type()].size;
    largest = std::max(largest, parameters.values.numel());
    buckets_.push_back(std::move(bucket));
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].hook = std::make_unique<GradientHook>(slots_[i].place.parameter, [this, i] { on_gradient(i); });
  }
  if (!keeps_whole()) return;
  for (auto& bucket : buckets_) take_memory(bucket);
}

// ---- Gradients and their memory.

void ShardedReducer::take_memory(Bucket& bucket) {
  const at::Tensor& values = bucket.parameters.values;
  if (keeps_whole()) {
    bucket.memory = at::zeros_like(values);
  } else {
    auto& pieces = pieces_.at(values.scalar_type());
    bucket.shares_piece = !pieces.spare.empty() || pieces.made < 2;
    if (!pieces.spare.empty()) {
      bucket.piece = pieces.spare.back();
      pieces.spare.pop_back();
    } else {
      bucket.piece = at::empty({bucket.shares_piece ? pieces.size : values.numel()}, values.options());
      if (bucket.shares_piece) ++pieces.made;
    }
    bucket.memory = bucket.piece.narrow(0, 0, values.numel());
    bucket.memory.narrow(0, bucket.parameters.size, values.numel() - bucket.parameters.size).zero_();
  }
  for (const size_t slot : bucket.slots) slots_[slot].view = ShardedBucket::view(slots_[slot].place, bucket.memory);
}

void ShardedReducer::give_memory(Bucket& bucket) {
  for (const size_t slot : bucket.slots) slots_[slot].view.reset();
  bucket.memory.reset();
  const at::Tensor piece = std::exchange(bucket.piece, {});
  if (bucket.shares_piece) pieces_.at(piece.scalar_type()).spare.push_back(piece);
}

// With stage 1 .grad is the view, and grows there; with stage 2 it is gone afterwards.
void ShardedReducer::collect(Slot& slot) {
  const c10::AutoGradMode no_grad(false);
  if (!slot.view.defined()) take_memory(buckets_[slot.bucket]);
  auto& gradient = slot.place.parameter.mutable_grad();
  const bool grows = !keeps_whole() && slot.ready;  // by a backward inside the backward
  slot.had = slot.had || gradient.defined();
  if (!gradient.defined()) {
    if (!grows) slot.view.zero_();
  } else if (gradient.layout() != at::kStrided) {
    throw Error(rank_.name() + ": ShardedOptimizer: the gradient of " + slot.place.name +
                " is sparse, which cannot be averaged; build its Embedding with sparse(false)");
  } else if (grows) {
    slot.view.add_(gradient);
  } else if (!same_memory(gradient, slot.view)) {
    slot.view.copy_(gradient);
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
    slot.place.parameter.mutable_grad().reset();
    slot.used = false;
  }
  for (auto& bucket : buckets_) bucket.adds = false;
  averaged_ = false;
}

std::vector<at::Tensor> ShardedReducer::gradients() {
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> gradients;
  for (const auto& slot : slots_) {
    if (slot.place.piece.size > 0) gradients.push_back(gradient_of(slot));
  }
  return gradients;
}

// variable_data: no view in autograd's eyes, whose detach_() an optimizer's zero_grad() could not do.
at::Tensor ShardedReducer::gradient_of(const Slot& slot) const {
  const auto& piece = slot.place.piece;
  if (!slot.used || piece.size == 0) return {};
  return buckets_[slot.bucket].gradient.narrow(0, piece.in_slice, piece.size).variable_data();
}

void ShardedReducer::check_averaged() const {
  if (averaged_) return;
  throw Error(rank_.name() + ": ShardedOptimizer: there are no averaged gradients to step with. Call " +
              "DataParallel's loss(…).backward(), outside of no_sync(), before each step()");
}

std::vector<std::pair<std::string, at::Tensor>> ShardedReducer::slices() {
  const std::lock_guard lock(mutex_);
  check_averaged();
  std::vector<std::pair<std::string, at::Tensor>> pieces;
  for (const auto& slot : slots_) {
    const at::Tensor gradient = gradient_of(slot);
    if (gradient.defined()) pieces.emplace_back(slot.place.name, gradient);
  }
  return pieces;
}

void ShardedReducer::check_unchanged() {
  const at::Tensor left = left_, values = values_left_;
  forget_left();
  if (!left.defined() || same_values(left, values)) return;
  throw Error(rank_.name() + ": ShardedOptimizer: .grad was changed between backward() and step(), which uses the " +
              "averages that it has elsewhere. Clip with lockstep::clip_grad_norm(optimizer, max_norm), whose norm is "
              "the whole network's; change what optimizer.gradients() gives for anything else");
}

void ShardedReducer::use() {
  const std::lock_guard lock(mutex_);
  check_averaged();
  check_unchanged();
  for (auto& slot : slots_) {
    if (slot.place.piece.size > 0) slot.place.piece.values.mutable_grad() = gradient_of(slot);
  }
  if (keeps_whole()) return;
  averaged_ = false;
  for (auto& bucket : buckets_) bucket.adds = false;
}

// ---- A backward.

void ShardedReducer::check_that_steps_were_averaged() {
  const std::lock_guard lock(mutex_);
  alone_.check();
}

void ShardedReducer::average(const std::function<void()>& backward, const PartSizes& sizes) {
  check_that_steps_were_averaged();
  start();
  backward();
  finish(sizes);
}

void ShardedReducer::abandon() {
  const std::lock_guard lock(mutex_);
  active_ = false;
  open_.clear();
}

void ShardedReducer::listen(bool last) {
  const std::lock_guard lock(mutex_);
  listening_ = last;
  if (!last) forget_left();  // what comes adds to .grad
}

void ShardedReducer::start() {
  const std::lock_guard lock(mutex_);
  for (auto& slot : slots_) {
    slot.ready = slot.had = false;
    slot.used = slot.used && buckets_[slot.bucket].adds;
  }
  alone_.forget();
  forget_left();
  for (auto& bucket : buckets_) {
    bucket.missing = bucket.slots.size();
    bucket.posted = false;
  }
  completed_.clear();
  next_ = 0;
  active_ = true;
}

void ShardedReducer::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (!active_) return alone_.note(slot.place.name, slot.place.parameter);
  Bucket& bucket = buckets_[slot.bucket];
  if (slot.ready) {  // a backward inside the backward, as activation checkpointing does it
    if (bucket.posted) {
      throw Error(rank_.name() + ": ShardedOptimizer: the gradient of " + slot.place.name +
                  " grew again after it had been averaged, in the same backward. Use the option overlap = false");
    }
    return collect(slot);
  }
  if (!listening_) return;
  const comm::Purpose purpose(backward_name());
  collect(slot);
  slot.ready = true;
  if (--bucket.missing == 0) completed_.push_back(slot.bucket);
  if (!options_.overlap) return;
  post_ready_buckets();
  poll();
}

void ShardedReducer::post_ready_buckets() {
  while (next_ < order_.size() && buckets_[order_[next_]].missing == 0) post(buckets_[order_[next_]]);
}

// In stage 2 this waits, inside of backward, for the bucket before: a rank that is far ahead of the others would keep
// all of its gradients.
void ShardedReducer::post(Bucket& bucket) {
  if (!keeps_whole() && !open_.empty()) complete_oldest();
  const size_t index = order_[next_];
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    bucket.range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    bucket.range->_setAsync();
    bucket.range->before("lockstep::bucket " + std::to_string(index) + " reduce_scatter");
  }
  const c10::AutoGradMode no_grad(false);
  bucket.average = bucket.adds ? at::empty_like(bucket.gradient) : bucket.gradient;
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  bucket.work = rank_.backend()._reduce_scatter_base(bucket.average, bucket.memory, options);
  bucket.posted = true;
  ++next_;
  open_.push_back(index);
}

void ShardedReducer::complete_oldest() {
  const c10::AutoGradMode no_grad(false);
  Bucket& bucket = buckets_[open_.front()];
  bucket.work->wait();
  open_.pop_front();
  bucket.work.reset();
  bucket.range.reset();
  if (bucket.adds) bucket.gradient.add_(bucket.average);
  bucket.average.reset();
  if (keeps_whole()) return;
  bucket.adds = true;
  give_memory(bucket);
}

// On GPUs a work that is found complete would make backward's stream wait for it; NCCL gets on by itself.
void ShardedReducer::poll() {
  if (!rank_.device().is_cpu()) return;
  for (const size_t index : open_) buckets_[index].work->isCompleted();
}

void ShardedReducer::finish(const PartSizes& sizes) {
  const std::lock_guard lock(mutex_);
  const comm::Purpose purpose(backward_name());
  active_ = false;
  while (next_ < order_.size()) {
    Bucket& bucket = buckets_[order_[next_]];
    for (const size_t slot : bucket.slots) {
      if (!slots_[slot].ready) collect(slots_[slot]);
    }
    post(bucket);
  }
  std::vector<bool> had;
  for (const auto& slot : slots_) had.push_back(slot.had);
  report_.post(had, sizes);
  while (!open_.empty()) complete_oldest();
  report_.wait();
  note_used();
  averaged_ = true;
  note_left();
  if (!learned_) learn_order();
}

// As on one device: a parameter without a gradient stays without, so that an optimizer leaves it alone.
void ShardedReducer::note_used() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.used = slot.used || slot.had || report_.any_had(i);
    if (!slot.used) slot.place.parameter.mutable_grad().reset();
  }
}

// On a GPU the host would wait for what it compares, so there in the first steps only.
void ShardedReducer::note_left() {
  if (!rank_.device().is_cpu() && ++compared_ > kComparedOnGpu) return;
  const Slot* smallest = nullptr;
  for (const auto& slot : slots_) {
    const bool smaller = smallest == nullptr || slot.place.parameter.numel() < smallest->place.parameter.numel();
    if (slot.used && smaller) smallest = &slot;
  }
  if (smallest == nullptr || (!keeps_whole() && smallest->place.parameter.numel() > kLargestFiller)) return;
  const c10::AutoGradMode no_grad(false);
  smallest_ = static_cast<size_t>(smallest - slots_.data());
  const at::Tensor& parameter = smallest->place.parameter;
  if (!keeps_whole()) parameter.mutable_grad() = at::full_like(parameter, filler_of(parameter.scalar_type()));
  left_ = parameter.grad();
  values_left_ = left_.clone();
}

void ShardedReducer::forget_left() {
  if (!left_.defined()) return;
  auto& gradient = slots_[smallest_].place.parameter.mutable_grad();
  if (!keeps_whole() && gradient.defined() && same_memory(gradient, left_)) gradient.reset();
  left_.reset();
  values_left_.reset();
}

void ShardedReducer::take_filler_away() {
  const std::lock_guard lock(mutex_);
  forget_left();
}

// One broadcast tells every rank in which order rank 0 completed its buckets; those that it did not complete come last.
void ShardedReducer::learn_order() {
  std::vector<int64_t> order(completed_.begin(), completed_.end());
  for (const size_t bucket : order_) {
    if (std::find(completed_.begin(), completed_.end(), bucket) == completed_.end()) {
      order.push_back(static_cast<int64_t>(bucket));
    }
  }
  const bool saw_gradients = std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.ready; });
  order.push_back(saw_gradients ? 1 : 0);
  const at::Tensor table = at::tensor(order, at::kLong).to(rank_.device());
  rank_.broadcast(table);
  const at::Tensor first = table.cpu();
  const auto cells = first.accessor<int64_t, 1>();
  for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<size_t>(cells[static_cast<int64_t>(i)]);
  learned_ = cells[static_cast<int64_t>(order_.size())] == 1;
}

}  // namespace lockstep
