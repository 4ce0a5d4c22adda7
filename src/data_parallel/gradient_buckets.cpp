#include "gradient_buckets.hpp"

#include <ATen/ops/tensor.h>
#include <lockstep/base/error.hpp>

#include "comm/purpose.hpp"
#include "devices/cuda_graph.hpp"
#include "ranks/rank_place.hpp"

#include <algorithm>
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
  slot_of_[parameter.unsafeGetTensorImpl()] = index;
  slots_[index].hook = std::make_unique<GradientHook>(parameter, [this, index] { on_gradient(index); });
}

// ---- A backward, in its order.

void GradientBuckets::average(const std::function<void()>& backward, const PartSizes& sizes) {
  check();
  check_types();
  check_that_steps_were_averaged();
  if (by_grains() != sizes.by_grains) {
    throw Error(name() +
                ": parts of one step are computed by grains and not by grains, so their gradients cannot add " +
                "up; take batches with the same BatchOptions::grain");
  }
  start();
  backward();
  finish(sizes);
}

void GradientBuckets::check_types() const {
  for (const auto& slot : slots_) {
    if (slot.parameter.scalar_type() == slot.type) continue;
    throw Error(name() + ": " + slot.name + " was " + c10::toString(slot.type) + " when this was made, and is " +
                c10::toString(slot.parameter.scalar_type()) +
                " now, so that its gradients would be of another type. Convert the module first, as by net->to(), then "
                "make the DataParallel, and then the optimizer");
  }
}

void GradientBuckets::start() {
  const std::lock_guard lock(mutex_);
  for (auto& slot : slots_) slot.ready = slot.had = slot.adds = false;
  for (auto& bucket : buckets_) {
    bucket.missing = bucket.slots.size();
    bucket.posted = false;
  }
  alone_.forget();
  outside_ = false;
  ready_order_.clear();
  next_ = 0;
  before_backward();
  active_ = true;
}

void GradientBuckets::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  if (grain_) return on_grain_gradient(index);
  Slot& slot = slots_[index];
  if (!active_) {
    outside_ = true;
    if (may_change_alone()) alone_.note(slot.name, slot.parameter);
    return;
  }
  if (slot.ready) {  // a backward inside the backward, as activation checkpointing does it
    if (buckets_[slot.bucket].posted) refuse_growth(slot);
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

void GradientBuckets::refuse_growth(const Slot& slot) const {
  throw Error(name() + ": the gradient of " + slot.name +
              " grew again after it had been averaged, in the same backward. Use the option overlap = false");
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
  if (by_grains()) bucket.sums->finish();
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
      if (!by_grains() && !slots_[slot].ready) collect(slot);
    }
    bucket.missing = 0;
    take_turns(/*may_wait=*/true);
  }
  take_turns(/*may_wait=*/true);
  for (const auto& bucket : buckets_) {
    for (size_t place = 0; by_grains() && place < bucket.slots.size(); ++place) {
      Slot& slot = slots_[bucket.slots[place]];
      slot.had = slot.before.defined() || bucket.sums->any(place);
    }
  }
  // A CUDA graph cannot record what the host reads. All ranks record the same steps.
  const bool reports = !records();
  if (reports) {
    std::vector<bool> had;
    for (const auto& slot : slots_) had.push_back(slot.had);
    report_.post(had, sizes, compared_parameter());
  }
  complete();
  if (reports) report_.wait();
  if (by_grains()) leave_gradients();
  leave_unused_undefined(reports);
  after_backward(sizes.partial);
  end_grains();
  if (!learnt_) learn_order();
}

// The parameters take turns.
BackwardReport::Compared GradientBuckets::compared_parameter() {
  if (slots_.empty() || !compares() || !may_change_alone()) return {};
  const Slot& slot = slots_[turns_++ % slots_.size()];
  return {slot.name, slot.parameter};
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
    if (slot.used || !slot.parameter.requires_grad()) continue;  // what is frozen meanwhile is not to be used
    names += (names.empty() ? "" : ", ") + slot.name;
  }
  if (names.empty() || rank_.index() != 0) return;
  comm::RankPlace::of(rank_).warn("DataParallel: no rank used these parameters in the first backward: " + names +
                                  ". Their gradients stay undefined, and their buckets are averaged after backward. If "
                                  "they are never used, requires_grad_(false) saves that");
}

void GradientBuckets::abandon() {
  const std::lock_guard lock(mutex_);
  active_ = false;
  failure_ = nullptr;
  end_grains();
  forget_open();
}

// ---- By grains.

void GradientBuckets::begin_grains(const GrainPlan& plan) {
  const std::lock_guard lock(mutex_);
  if (plan_ && *plan_ == plan) return;
  if (plan_) {
    throw Error(name() + ": gradients of two batches cannot add up where they are computed by grains: end each batch " +
                "with a backward outside of no_sync()");
  }
  if (records()) throw Error(name() + ": a CUDA graph cannot record what is computed by grains; take no graph");
  refuse_gradients_from_outside();
  before_grains();
  plan_ = plan;
  const auto rank = static_cast<size_t>(rank_.index());
  run_ = {plan.runs[rank], plan.runs[rank + 1]};
  const c10::AutoGradMode no_grad(false);
  for (auto& slot : slots_) slot.before = std::exchange(slot.parameter.mutable_grad(), {});
  for (size_t index = 0; index < buckets_.size(); ++index) {
    Bucket& bucket = buckets_[index];
    if (!bucket.sums) {
      for (size_t place = 0; place < bucket.slots.size(); ++place) slots_[bucket.slots[place]].place = place;
      const auto view = [this, slots = bucket.slots](size_t place, const at::Tensor& row) {
        return view_in(slots[place], row);
      };
      const auto type = at::TensorOptions(rank_.device()).dtype(slots_[bucket.slots[0]].parameter.scalar_type());
      bucket.sums = std::make_unique<GrainSums>(bucket.slots.size(), columns_of(index), type, view);
    }
    bucket.sums->begin(run_, row_of(index));
    for (size_t place = 0; place < bucket.slots.size(); ++place) {
      const auto kept = resumed_.gradients.find(slots_[bucket.slots[place]].name);
      if (kept != resumed_.gradients.end()) bucket.sums->resume(place, std::move(kept->second));
    }
  }
  again_ = std::exchange(resumed_, {}).grains;
  is_whole_ = true;
  add_up_to(run_.begin);
}

void GradientBuckets::add_up_to(int64_t grain) {
  done_ = {run_.begin, grain == again_.begin ? std::max(grain, again_.end) : grain};
}

// What one rank alone has added would never be averaged. A gradient that zero_grad() left may stay.
void GradientBuckets::refuse_gradients_from_outside() {
  if (!std::exchange(outside_, false)) return;
  for (const auto& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (!gradient.defined() || gradient.count_nonzero().item<int64_t>() == 0) continue;
    throw Error(name() + ": the gradient of " + slot.name +
                " has values of a backward without a grain, which cannot add up with grains. Call zero_grad() before "
                "the batch, and put all of the loss into the function or criterion that loss() is given");
  }
}

void GradientBuckets::open_grain(int64_t number, int64_t stand_ins) {
  const std::lock_guard lock(mutex_);
  for (auto& slot : slots_) {
    slot.taken = false;
    if (!slot.parameter.grad().defined()) continue;
    throw Error(
        name() + ": something added to the gradient of " + slot.name +
        " between two grains of a step. Put all of the loss into the function or criterion that loss() is given");
  }
  grain_ = number;
  is_whole_ = false;
  last_grain_ = stand_ins == 0 && (number == kStandIn || number + 1 == run_.end);
}

void GradientBuckets::close_grain() {
  const std::lock_guard lock(mutex_);
  for (size_t index = 0; index < slots_.size(); ++index) {
    if (slots_[index].parameter.grad().defined() || slots_[index].factors) take_grain_gradient(index);
  }
  if (*grain_ != kStandIn) add_up_to(*grain_ + 1);
  is_whole_ = true;
  grain_.reset();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// With overlap a gradient is added up while the caches still hold it; and in the last grain, its bucket may go.
void GradientBuckets::on_grain_gradient(size_t index) {
  Slot& slot = slots_[index];
  if (overlap_ && std::exchange(slot.taken, true)) refuse_growth(slot);
  if (overlap_) take_grain_gradient(index);
  if (!active_ || !last_grain_ || slot.ready) return;
  slot.ready = true;
  ready_order_.push_back(index);
  if (!overlap_) return;
  const comm::Purpose purpose(backward_name());
  --buckets_[slot.bucket].missing;
  if (failure_) return;
  try {
    take_turns(/*may_wait=*/false);
    poll();
  } catch (...) {
    if (!keeps_sums_) throw;
    failure_ = std::current_exception();
  }
}

void GradientBuckets::take_grain_gradient(size_t index) {
  Slot& slot = slots_[index];
  if (*grain_ == kStandIn) return slot.parameter.mutable_grad().reset();
  GrainSums& sums = *buckets_[slot.bucket].sums;
  const auto factors = std::exchange(slot.factors, std::nullopt);
  if (!factors) {
    refuse_sparse(slot);
    if (grain_observer()) grain_observer()(*grain_, slot.parameter, slot.parameter.grad());
  }
  if (!(factors ? sums.add(slot.place, *grain_, *factors) : sums.add(slot.place, *grain_, slot.parameter.grad()))) {
    throw Error(name() + ": the gradient of " + slot.name + " came again for grain " + std::to_string(*grain_) +
                ", or for an earlier one: by grains a batch is computed once and in order. End each step with a " +
                "backward outside of no_sync()");
  }
  slot.parameter.mutable_grad().reset();
}

// x may change after backward, as when a layer writes each grain's result to the same memory. So it is copied.
bool GradientBuckets::take_factors(const at::Tensor& parameter, const GradientFactors& factors) {
  const std::lock_guard lock(mutex_);
  const auto found = slot_of_.find(parameter.unsafeGetTensorImpl());
  if (!grain_ || grain_observer() || found == slot_of_.end()) return false;
  Slot& slot = slots_[found->second];
  if (!slot.parameter.is_contiguous() || !GrainSums::takes(factors)) return false;
  slot.factors = {.grad = factors.grad, .x = factors.x.clone()};
  return true;
}

HookRound GradientBuckets::post_average_of_grains(size_t bucket, const at::Tensor& target) {
  return post_grain_average(rank_, buckets_[bucket].sums->rows(), *plan_, target, in_slices(), keeps_sums_);
}

bool GradientBuckets::keep_gradients() {
  const std::lock_guard lock(mutex_);
  done_ = {};
  return keeps_sums_ = keeps_whole();
}

bool GradientBuckets::take_kept(KeptGrains& kept) {
  const std::lock_guard lock(mutex_);
  if (done_.end < again_.end) return false;  // losses that are known count those grains too
  const auto has_sums = [](const Bucket& bucket) { return static_cast<bool>(bucket.sums); };  // new buckets have none
  if (!keeps_sums_ || !is_whole_ || done_.size() == 0 || !std::all_of(buckets_.begin(), buckets_.end(), has_sums)) {
    return false;
  }
  kept.grains = done_;
  for (auto& bucket : buckets_) {
    for (size_t place = 0; place < bucket.slots.size(); ++place) {
      kept.gradients[slots_[bucket.slots[place]].name] = bucket.sums->take(place, done_.end);
    }
  }
  return true;
}

void GradientBuckets::resume(const KeptGrains& kept) {
  const std::lock_guard lock(mutex_);
  resumed_ = kept;
}

void GradientBuckets::end_grains() {
  plan_.reset();
  grain_.reset();
  for (auto& slot : slots_) {
    slot.before.reset();
    slot.factors.reset();
  }
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
  return rank_.device().is_cuda() && is_recording();
}

}  // namespace lockstep
