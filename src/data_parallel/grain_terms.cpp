#include "grain_terms.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "comm/purpose.hpp"
#include "comm/reduction.hpp"
#include "comm/tree_average.hpp"
#include "flat_view.hpp"
#include "grain_tree.hpp"

#include <algorithm>

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors slice_of_each(const Tensors& rows, int64_t number, int64_t slice) {
  Tensors slices;
  for (const auto& row : rows) slices.push_back(row.narrow(0, number * slice, slice));
  return slices;
}

// Gives [rows, slice].
at::Tensor stacked(const Tensors& rows, int64_t slice, const at::TensorOptions& options) {
  if (rows.empty()) return at::empty({0, slice}, options);
  return rows.size() == 1 ? rows[0].unsqueeze(0) : at::stack(rows);
}

// Each rank sends each other its slice of the rows. Then a rank has all rows of its own slice, and adds these.
CommunicationHook::Round post_by_alltoall(Rank& rank, const Tensors& rows, const std::vector<int64_t>& rows_of_ranks,
                                          const comm::TreeAverage& average, const at::Tensor& target, bool in_slices) {
  const int64_t slice = in_slices ? target.numel() : target.numel() / rank.world_size();
  const at::Tensor nothing = at::empty({0}, target.options());
  Tensors inputs, outputs;
  for (int other = 0; other < rank.world_size(); ++other) {
    const bool stays = other == rank.index();
    inputs.push_back(stays ? nothing : stacked(slice_of_each(rows, other, slice), slice, target.options()));
    const int64_t theirs = rows_of_ranks[static_cast<size_t>(other)];
    outputs.push_back(stays ? nothing : at::empty({theirs, slice}, target.options()));
  }
  CommunicationHook::Round round;
  if (rank.world_size() > 1) round.work = rank.backend().alltoall(outputs, inputs);

  const auto average_to = [=, own = slice_of_each(rows, rank.index(), slice)](const at::Tensor& to) {
    Tensors sums;
    for (int other = 0; other < static_cast<int>(outputs.size()); ++other) {
      const Tensors theirs = other == rank.index() ? own : outputs[static_cast<size_t>(other)].unbind();
      sums.insert(sums.end(), theirs.begin(), theirs.end());
    }
    std::vector<const at::Tensor*> values;
    for (const auto& sum : sums) values.push_back(&sum);
    comm::average_in_tree(values, average, {&to}, {0, slice}, 0);
  };
  if (in_slices || rank.world_size() == 1) {
    round.finish = [=] { average_to(target); };
  } else {
    round.next = [=]() mutable -> CommunicationHook::Round {
      at::Tensor of_slice = at::empty({slice}, target.options()), all = target;
      average_to(of_slice);
      return {.work = rank.backend()._allgather_base(all, of_slice)};
    };
  }
  return round;
}

}  // namespace

CommunicationHook::Round post_grain_average(Rank& rank, const Tensors& rows, const GrainPlan& plan,
                                            const at::Tensor& target, bool in_slices) {
  const c10::AutoGradMode no_grad(false);
  std::vector<GrainBlock> all;
  std::vector<int64_t> rows_of_ranks;
  for (size_t other = 0; other + 1 < plan.runs.size(); ++other) {
    const auto theirs = blocks_of({plan.runs[other], plan.runs[other + 1]});
    all.insert(all.end(), theirs.begin(), theirs.end());
    rows_of_ranks.push_back(static_cast<int64_t>(theirs.size()));
  }
  const comm::TreeAverage average{additions_of(all), static_cast<double>(plan.samples)};
  const std::string parts = classic_text("grains at ", c10::IntArrayRef(plan.runs), " of ", plan.samples,
                                         " samples, to ", target.numel(), " values of ", target.scalar_type());
  const comm::AgreedParts agreed(parts);
  if (auto* const backend = comm::TreeBackend::of(rank.backend())) {
    return {.work = backend->average_in_tree(rows, average, target, in_slices)};
  }
  return post_by_alltoall(rank, rows, rows_of_ranks, average, target, in_slices);
}

// ---- The terms of a step.

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
  for (auto& slot : slots) slot.before = std::exchange(slot.parameter.mutable_grad(), {});
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
  if (slot.factors && slot.parameter.grad().defined()) {
    throw Error(name_ + ": two backwards, one within the other, read " + slot.name + " in one grain (activation " +
                "checkpointing). Let only one of them read it, or leave out BatchOptions::grain");
  }
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

// x may change after backward, as when a layer writes each grain's result to the same memory. So it is copied. So is a
// gradient that is a view, since autograd may own its memory.
bool GrainTerms::take_factors(size_t index, const GradientFactors& factors) {
  GradientSlot& slot = gradients_.slots[index];
  if (check_ || slot.factors || !slot.parameter.is_contiguous() || !GrainSums::takes(factors)) return false;
  slot.factors = {.grad = factors.grad.is_view() ? factors.grad.clone() : factors.grad,
                  .x = factors.x.clone(),
                  .sum_products = factors.sum_products};
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
