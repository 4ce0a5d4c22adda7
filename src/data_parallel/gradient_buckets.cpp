#include "gradient_buckets.hpp"

#include <ATen/ops/tensor.h>
#include <c10/util/ScopeExit.h>
#include <lockstep/base/error.hpp>

#include "base/exception_text.hpp"
#include "comm/purpose.hpp"
#include "devices/cuda_graph.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/rank_wait.hpp"

#include <set>
#include <utility>

namespace lockstep {

GradientBuckets::GradientBuckets(const Rank& rank, const Kind& kind, bool uses_buckets)
    : rank_(rank),
      queues_calls_(queues_its_calls(rank_)),
      name_(rank.name() + ": DataParallel"),
      kind_(kind),
      uses_buckets_(uses_buckets),
      terms_(rank, name_, gradients_, kind.in_slices, kind.check),
      report_(rank, name_),
      alone_(rank, name_) {}

void GradientBuckets::add_slot(const std::string& name, const at::Tensor& parameter) {
  const size_t index = slots_.size();
  slots_.push_back({.name = name, .parameter = parameter});
  gradients_.slot_of[parameter.unsafeGetTensorImpl()] = index;
  // Where a run has other ranks, their nets may lead to this one, and see by the hook whose parameter this is.
  if (!uses_buckets_ && comm::RankPlace::of(rank_).run->devices.size() == 1) return;
  slots_[index].hook = std::make_unique<GradientHook>(parameter, [this, index] { on_gradient(index); });
}

void GradientBuckets::forget_slots() {
  slots_.clear();
  gradients_.slot_of.clear();
  followed_.clear();
  learnt_ = false;
}

// ---- A backward, in its order.

void GradientBuckets::average_during(const std::function<void()>& backward, const PartSizes& sizes) {
  if (!failure_.empty()) throw Error(failure_);
  ++backwards_;
  if (uses_buckets_) (backward_name_ = "DataParallel's backward ") += std::to_string(backwards_);  // keeps its memory
  try {
    average(backward, sizes);
  } catch (...) {
    // Posting the rest would let the others go on with gradients that lack this rank's part. So this rank stays out of
    // step, and ranks that wait are told when it leaves or makes another call.
    failure_ =
        name_ + ": an earlier backward of this rank failed before its gradients were averaged, so it is out " +
        "of step with the other ranks. End the run there. What failed: " + exception_text(std::current_exception());
    try {
      give_up();
    } catch (const std::exception&) {  // the device may have failed too; the first failure counts
    }
    throw;
  }
}

void GradientBuckets::average(const std::function<void()>& backward, const PartSizes& sizes) {
  bool& averages = comm::RankPlace::of(rank_).averages;
  averages = true;
  const auto done = c10::make_scope_exit([&] { averages = false; });
  if (!uses_buckets_) return keep(backward, sizes);
  check_types();
  if (by_grains() != sizes.by_grains) {
    throw Error(name_ + ": parts of one step are computed by grains and not by grains, so their gradients cannot add " +
                "up; take batches with the same BatchOptions::grain");
  }
  start();
  backward();
  finish(sizes);
}

// Until a backward has left a gradient, this looks for types and sparse gradients that several ranks always refuse.
void GradientBuckets::keep(const std::function<void()>& backward, const PartSizes& sizes) {
  if (!learnt_) check_types();
  backward();
  report_.check_own(sizes);
  if (learnt_) return;
  for (auto& slot : slots_) {
    slot.used = slot.parameter.mutable_grad().defined();
    learnt_ = learnt_ || slot.used;
    if (slot.used) slot.refuse_sparse(name_);
  }
  if (learnt_) warn_of_unused();
}

void GradientBuckets::check_types() const {
  for (const auto& slot : slots_) {
    if (slot.parameter.scalar_type() == slot.type) continue;
    throw Error(name_ + ": " + slot.name + " was " + c10::toString(slot.type) + " when this was made, and is " +
                c10::toString(slot.parameter.scalar_type()) +
                " now, so that its gradients would be of another type. Convert the module first, as by net->to(), then "
                "make the DataParallel, and then the optimizer");
  }
}

void GradientBuckets::start() {
  const std::lock_guard lock(mutex_);
  alone_.check();
  alone_.forget();
  if (!by_grains()) begin(/*by_grains=*/false);
  for (auto& slot : slots_) slot.ready = slot.had = false;
  for (auto& bucket : buckets_) {
    bucket.missing = bucket.slots.size();
    bucket.posted = false;
  }
  outside_ = false;
  ready_order_.clear();
  next_ = 0;
  active_ = true;
}

void GradientBuckets::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  if (terms_.is_open()) return on_grain_gradient(index);
  GradientSlot& slot = slots_[index];
  if (!active_) {
    outside_ = true;
    if (kind_.may_change_alone) alone_.note(slot.name, slot.parameter);
    return;
  }
  if (slot.ready) {  // activation checkpointing runs a backward inside the backward
    if (buckets_[slot.bucket].posted) refuse_growth(slot);
    return collect(index);
  }
  const comm::Purpose purpose(backward_name_);
  if (listening_ || !kind_.in_slices) collect(index);
  if (!listening_) return;  // the next backwards add to this gradient
  --buckets_[slot.bucket].missing;
  note_ready(index);
}

// With overlap a gradient is added up while the caches still hold it. In the last grain its bucket may go.
void GradientBuckets::on_grain_gradient(size_t index) {
  GradientSlot& slot = slots_[index];
  if (kind_.overlap && std::exchange(slot.taken, true)) refuse_growth(slot);
  if (kind_.overlap) terms_.take(index);
  if (!active_ || !terms_.is_last() || slot.ready) return;
  const comm::Purpose purpose(backward_name_);
  if (kind_.overlap) --buckets_[slot.bucket].missing;
  note_ready(index);
}

bool GradientBuckets::take_factors(const at::Tensor& parameter, const GradientFactors& factors) {
  const std::lock_guard lock(mutex_);
  const auto found = gradients_.slot_of.find(parameter.unsafeGetTensorImpl());
  if (found == gradients_.slot_of.end() || !parameter.requires_grad()) return false;  // not ours, or frozen since
  if (terms_.is_open()) return terms_.take_factors(found->second, factors);
  return active_ && !slots_[found->second].ready && take_product(found->second, factors);
}

void GradientBuckets::note_ready(size_t index) {
  slots_[index].ready = true;
  ready_order_.push_back(index);
  if (kind_.overlap) move_on(/*may_wait=*/false);
}

void GradientBuckets::refuse_growth(const GradientSlot& slot) const {
  throw Error(name_ + ": the gradient of " + slot.name +
              " grew again after it had been averaged, in the same backward. Use the option overlap = false");
}

bool GradientBuckets::next_is_ready() const {
  return next_ < order_.size() && buckets_[order_[next_]].missing == 0;
}

void GradientBuckets::post_next() {
  const size_t index = order_[next_];
  auto& bucket = buckets_[index];
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    bucket.range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    bucket.range->_setAsync();
    bucket.range->before("lockstep::bucket " + std::to_string(index) + " " + kind_.collective);
  }
  if (by_grains()) terms_.finish(index);
  post(index);
  bucket.posted = true;
  ++next_;
}

// Goes bucket by bucket, because a posted bucket may give its memory to the next.
void GradientBuckets::finish(const PartSizes& sizes) {
  const std::lock_guard lock(mutex_);
  const comm::Purpose purpose(backward_name_);
  active_ = false;
  for (size_t place = next_; place < order_.size(); ++place) {
    auto& bucket = buckets_[order_[place]];
    for (const size_t slot : bucket.slots) {
      if (!by_grains() && !slots_[slot].ready) collect(slot);
    }
    bucket.missing = 0;
    move_on(/*may_wait=*/true);
  }
  move_on(/*may_wait=*/true);
  if (by_grains()) terms_.note_had();
  // A CUDA graph cannot record what the host reads. All ranks record the same steps.
  const bool reports = !records();
  if (reports) report(sizes);
  complete(sizes.partial);
  if (reports) report_.wait();
  leave_unused_undefined(reports);
  terms_.end();
  if (!learnt_) learn_order();
}

// Compares one parameter with the other ranks'. The parameters take turns.
void GradientBuckets::report(const PartSizes& sizes) {
  const bool compares = !slots_.empty() && compares_ && kind_.may_change_alone;
  report_.post(slots_, sizes, compares ? &slots_[turns_++ % slots_.size()] : nullptr);
}

// An optimizer's momentum and weight decay leave a parameter without a gradient alone, as on one device. A step that a
// CUDA graph records has no report; what earlier steps have told still holds.
void GradientBuckets::leave_unused_undefined(bool reported) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    GradientSlot& slot = slots_[i];
    if (reported || slot.had) slot.used = slot.adds || slot.had || report_.any_had(i);
    if (!slot.used) slot.parameter.mutable_grad().reset();
  }
}

void GradientBuckets::give_up() {
  const std::lock_guard lock(mutex_);
  active_ = false;
  abandon();
  if (queues_calls_) wait_on_stream(report_.open());
  terms_.end();
}

// ---- The order.

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
  followed_ = order;
  learnt_ = true;
  warn_of_unused();
}

void GradientBuckets::warn_of_unused() {
  std::string names;
  for (const auto& slot : slots_) {
    if (slot.used || !slot.parameter.requires_grad()) continue;  // parameters frozen since then are not missed
    names += (names.empty() ? "" : ", ") + slot.name;
  }
  if (names.empty() || rank_.index() != 0 || std::exchange(told_of_unused_, true)) return;
  comm::RankPlace::of(rank_).warn("DataParallel: no rank used these parameters in the first backward: " + names +
                                  ". Their gradients stay undefined, and their buckets are averaged after backward. If "
                                  "they are never used, requires_grad_(false) saves that");
}

std::vector<int64_t> GradientBuckets::order() const {
  if (followed_.empty() || kind_.in_slices) return {};
  std::vector<int64_t> order{static_cast<int64_t>(slots_.size())};
  order.insert(order.end(), followed_.begin(), followed_.end());
  return order;
}

void GradientBuckets::set_order(const std::vector<int64_t>& order) {
  const std::lock_guard lock(mutex_);
  const auto count = static_cast<int64_t>(slots_.size());
  if (!uses_buckets_ || kind_.in_slices || order.empty() || order.front() != count) return;
  std::vector<size_t> slots;
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i] >= count) return;
    if (order[i] >= 0) slots.push_back(static_cast<size_t>(order[i]));
  }
  const std::set<size_t> different(slots.begin(), slots.end());
  if (slots.empty() || different.size() < slots.size()) return;
  follow(slots);
  followed_ = slots;
  learnt_ = true;
}

// ---- By grains.

void GradientBuckets::begin_grains(const GrainPlan& plan) {
  const std::lock_guard lock(mutex_);
  if (terms_.continues(plan)) return;
  if (!uses_buckets_) check_types();               // begin() makes new slots
  if (!uses_buckets_) outside_ = backwards_ == 0;  // no hook has noted backwards outside; after one inside none counts
  begin(/*by_grains=*/true);
  terms_.begin(plan, std::exchange(outside_, false));
}

void GradientBuckets::open_grain(int64_t number, int64_t stand_ins) {
  const std::lock_guard lock(mutex_);
  terms_.open(number, stand_ins);
}

void GradientBuckets::close_grain() {
  const std::lock_guard lock(mutex_);
  terms_.close();
}

// ---- Outside of it.

void GradientBuckets::listen(bool last) {
  const std::lock_guard lock(mutex_);
  listening_ = last;
}

void GradientSlot::refuse_sparse(const std::string& owner) const {
  if (parameter.mutable_grad().layout() == at::kStrided) return;
  throw Error(owner + ": the gradient of " + name +
              " is sparse, which cannot be averaged; build its Embedding with sparse(false)");
}

bool GradientBuckets::records() const {
  return rank_.device().is_cuda() && is_recording();
}

}  // namespace lockstep
