#include "gradient_buckets.hpp"

#include <ATen/ops/tensor.h>
#include <lockstep/base/error.hpp>

#include "comm/purpose.hpp"
#include "devices/cuda_graph.hpp"
#include "ranks/rank_place.hpp"

#include <utility>

namespace lockstep {

GradientBuckets::GradientBuckets(const Rank& rank, const std::string& owner, std::string collective, bool overlap)
    : Averaging(rank.name() + ": " + owner),
      rank_(rank),
      collective_(std::move(collective)),
      overlap_(overlap),
      report_(rank, name()),
      alone_(rank, name()) {}

void GradientBuckets::add_slot(const std::string& name, const at::Tensor& parameter) {
  const size_t index = slots_.size();
  slots_.push_back({.name = name, .parameter = parameter});
  slots_[index].hook = std::make_unique<GradientHook>(parameter, [this, index] { on_gradient(index); });
}

// ---- A backward, in its order.

void GradientBuckets::average(const std::function<void()>& backward, const PartSizes& sizes) {
  check();
  check_that_steps_were_averaged();
  start();
  backward();
  finish(sizes);
}

void GradientBuckets::start() {
  const std::lock_guard lock(mutex_);
  for (auto& slot : slots_) slot.ready = slot.had = slot.adds = false;
  for (auto& bucket : buckets_) {
    bucket.missing = bucket.slots.size();
    bucket.posted = false;
  }
  alone_.forget();
  ready_order_.clear();
  next_ = 0;
  before_backward();
  active_ = true;
}

void GradientBuckets::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (!active_) return alone_.note(slot.name, slot.parameter);
  if (slot.ready) {  // a backward inside the backward, as activation checkpointing does it
    if (buckets_[slot.bucket].posted) {
      throw Error(name() + ": the gradient of " + slot.name +
                  " grew again after it had been averaged, in the same backward. Use the option overlap = false");
    }
    return collect(index);
  }
  const comm::Purpose purpose(backward_name());
  if (listening_ || keeps_whole()) collect(index);
  if (!listening_) return;  // the next backwards add to it
  slot.ready = true;
  --buckets_[slot.bucket].missing;
  ready_order_.push_back(index);
  if (!overlap_) return;
  take_turns(/*may_wait=*/false);
  poll();
}

void GradientBuckets::take_turns(bool /*may_wait*/) {
  while (next_is_ready()) post_next();
}

bool GradientBuckets::next_is_ready() const {
  return next_ < order_.size() && buckets_[order_[next_]].missing == 0;
}

void GradientBuckets::post_next() {
  const size_t index = order_[next_];
  Bucket& bucket = buckets_[index];
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    bucket.range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    bucket.range->_setAsync();
    bucket.range->before("lockstep::bucket " + std::to_string(index) + " " + collective_);
  }
  post(index);
  bucket.posted = true;
  ++next_;
}

// Bucket by bucket, because one that is posted may give its memory to the next.
void GradientBuckets::finish(const PartSizes& sizes) {
  const std::lock_guard lock(mutex_);
  const comm::Purpose purpose(backward_name());
  active_ = false;
  for (size_t place = next_; place < order_.size(); ++place) {
    Bucket& bucket = buckets_[order_[place]];
    for (const size_t slot : bucket.slots) {
      if (!slots_[slot].ready) collect(slot);
    }
    bucket.missing = 0;
    take_turns(/*may_wait=*/true);
  }
  take_turns(/*may_wait=*/true);
  // A CUDA graph cannot record what the host reads. All ranks record the same steps.
  const bool reports = !records();
  if (reports) {
    std::vector<bool> had;
    for (const auto& slot : slots_) had.push_back(slot.had);
    report_.post(had, sizes);
  }
  complete();
  if (reports) report_.wait();
  leave_unused_undefined(reports);
  after_backward();
  if (!learnt_) learn_order();
}

// An optimizer's momentum and weight decay leave a parameter without a gradient alone, as on one device. A step that a
// CUDA graph records has no report; what earlier steps have told still holds.
void GradientBuckets::leave_unused_undefined(bool reported) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (reported || slot.had) slot.used = slot.adds || slot.had || report_.any_had(i);
    if (!slot.used) slot.parameter.mutable_grad().reset();
  }
}

// One broadcast tells every rank in which order rank 0 got its gradients. With an empty part it got none, so that the
// order is learnt later.
void GradientBuckets::learn_order() {
  if (slots_.empty()) return;
  std::vector<int64_t> places(ready_order_.begin(), ready_order_.end());
  places.resize(slots_.size(), -1);
  const at::Tensor table = at::tensor(places, at::kLong).to(rank_.device());
  rank_.broadcast(table);
  const at::Tensor first = table.cpu();
  const auto cells = first.accessor<int64_t, 1>();
  std::vector<size_t> order;
  for (int64_t i = 0; i < cells.size(0) && cells[i] >= 0; ++i) order.push_back(static_cast<size_t>(cells[i]));
  if (order.empty()) return;
  follow(order);
  learnt_ = true;
  warn_of_unused();
}

void GradientBuckets::warn_of_unused() const {
  std::string names;
  for (const auto& slot : slots_) {
    if (!slot.used) names += (names.empty() ? "" : ", ") + slot.name;
  }
  if (names.empty() || rank_.index() != 0) return;
  comm::RankPlace::of(rank_).warn("DataParallel: no rank used these parameters in the first backward: " + names +
                                  ". Their gradients stay undefined, and their buckets are averaged after backward. If "
                                  "they are never used, requires_grad_(false) saves that");
}

void GradientBuckets::abandon() {
  const std::lock_guard lock(mutex_);
  active_ = false;
  forget_open();
}

// ---- Outside of it.

void GradientBuckets::listen(bool last) {
  const std::lock_guard lock(mutex_);
  listening_ = last;
}

void GradientBuckets::check_that_steps_were_averaged() {
  const std::lock_guard lock(mutex_);
  alone_.check();
}

void GradientBuckets::refuse_sparse(const Slot& slot) const {
  if (slot.parameter.grad().layout() == at::kStrided) return;
  throw Error(name() + ": the gradient of " + slot.name +
              " is sparse, which cannot be averaged; build its Embedding with sparse(false)");
}

bool GradientBuckets::records() const {
  return !rank_.device().is_cpu() && is_recording();
}

}  // namespace lockstep
