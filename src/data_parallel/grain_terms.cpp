#include "grain_terms.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "flat_view.hpp"
#include "grain_exchange.hpp"

#include <algorithm>

namespace lockstep {

bool GrainTerms::continues(const GrainPlan& plan) const {
  if (!plan_ || *plan_ == plan) return plan_.has_value();
  throw Error(name_ + ": gradients of two batches cannot add up where they are computed by grains: end each batch " +
              "with a backward outside of no_sync()");
}

void GrainTerms::begin(const GrainPlan& plan, bool backward_outside) {
  if (backward_outside) refuse_gradients_from_outside();
  plan_ = plan;
  const auto rank = static_cast<size_t>(rank_.index());
  run_ = {plan.runs[rank], plan.runs[rank + 1]};
  const c10::AutoGradMode no_grad(false);
  auto& slots = gradients_.slots;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    slots[slot].before = std::exchange(slots[slot].parameter.mutable_grad(), {});
    slot_of_[slots[slot].parameter.unsafeGetTensorImpl()] = slot;
  }
  for (auto& bucket : gradients_.buckets) {
    if (!bucket.sums) {
      for (size_t place = 0; place < bucket.slots.size(); ++place) slots[bucket.slots[place]].place = place;
      const auto view = [&slots, of_bucket = bucket.slots](size_t place, const at::Tensor& row) {
        const GradientSlot& slot = slots[of_bucket[place]];
        return view_in_flat(slot.parameter, row, slot.offset);
      };
      const auto type = at::TensorOptions(rank_.device()).dtype(slots[bucket.slots[0]].parameter.scalar_type());
      bucket.sums = std::make_unique<GrainSums>(bucket.slots.size(), bucket.columns, type, view);
    }
    const bool adds = std::any_of(bucket.slots.begin(), bucket.slots.end(),
                                  [&](size_t slot) { return slots[slot].before.defined(); });
    bucket.sums->begin(run_, adds ? at::Tensor() : bucket.row);
  }
}

// Nobody would ever average values that one rank alone has added. A gradient that zero_grad() left may stay.
void GrainTerms::refuse_gradients_from_outside() const {
  for (const auto& slot : gradients_.slots) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (!gradient.defined() || gradient.count_nonzero().item<int64_t>() == 0) continue;
    throw Error(name_ + ": the gradient of " + slot.name +
                " has values of a backward without a grain, which cannot add up with grains. Call zero_grad() before "
                "the batch, and put all of the loss into the function or criterion that loss() is given");
  }
}

void GrainTerms::end() {
  plan_.reset();
  grain_.reset();
  for (auto& slot : gradients_.slots) {
    slot.before.reset();
    slot.factors.reset();
  }
}

void GrainTerms::open(int64_t number, int64_t stand_ins) {
  for (auto& slot : gradients_.slots) {
    slot.taken = false;
    if (!slot.parameter.grad().defined()) continue;
    throw Error(
        name_ + ": something added to the gradient of " + slot.name +
        " between two grains of a step. Put all of the loss into the function or criterion that loss() is given");
  }
  grain_ = number;
  last_ = stand_ins == 0 && (number == kStandIn || number + 1 == run_.end);
}

void GrainTerms::close() {
  for (size_t slot = 0; slot < gradients_.slots.size(); ++slot) {
    if (gradients_.slots[slot].parameter.grad().defined() || gradients_.slots[slot].factors) take(slot);
  }
  grain_.reset();
}

void GrainTerms::take(size_t index) {
  GradientSlot& slot = gradients_.slots[index];
  if (*grain_ == kStandIn) return slot.parameter.mutable_grad().reset();
  GrainSums& sums = *gradients_.buckets[slot.bucket].sums;
  GrainSums::Sum gradient;
  if (slot.factors) {
    gradient.factors.push_back(*std::exchange(slot.factors, std::nullopt));
  } else {
    gradient.value = slot.parameter.grad();
    slot.refuse_sparse(name_);
    if (check_) check_->note(*grain_, slot.parameter, gradient.value);
  }
  if (!sums.add(slot.place, *grain_, std::move(gradient))) {
    throw Error(name_ + ": the gradient of " + slot.name + " came again for grain " + std::to_string(*grain_) +
                ", or for an earlier one: by grains a batch is computed once and in order. End each step with a " +
                "backward outside of no_sync()");
  }
  slot.parameter.mutable_grad().reset();
}

// x may change after backward, as when a layer writes each grain's result to the same memory. So it is copied.
bool GrainTerms::take_factors(const at::Tensor& parameter, const GradientFactors& factors) {
  const auto found = slot_of_.find(parameter.unsafeGetTensorImpl());
  if (!grain_ || check_ || found == slot_of_.end()) return false;
  GradientSlot& slot = gradients_.slots[found->second];
  if (!slot.parameter.is_contiguous() || !GrainSums::takes(factors)) return false;
  slot.factors = {.grad = factors.grad, .x = factors.x.clone(), .sum_products = factors.sum_products};
  return true;
}

CommunicationHook::Round GrainTerms::post(size_t bucket, const at::Tensor& target) {
  return post_grain_average(rank_, gradients_.buckets[bucket].sums->rows(), *plan_, target, in_slices_);
}

void GrainTerms::note_had() {
  for (const auto& bucket : gradients_.buckets) {
    for (size_t place = 0; place < bucket.slots.size(); ++place) {
      GradientSlot& slot = gradients_.slots[bucket.slots[place]];
      slot.had = slot.before.defined() || bucket.sums->any(place);
    }
  }
}

}  // namespace lockstep
