#include "grain_exchange.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include "base/classic.hpp"
#include "comm/agreed_parts.hpp"
#include "comm/reduction.hpp"
#include "comm/tree_average.hpp"
#include "grain_tree.hpp"

#include <string>
#include <utility>

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors slice_of_each(const Tensors& rows, int64_t number, int64_t slice) {
  Tensors slices;
  for (const auto& row : rows) slices.push_back(row.narrow(0, number * slice, slice));
  return slices;
}

// [rows, slice]
at::Tensor stacked(const Tensors& rows, int64_t slice, const at::TensorOptions& options) {
  if (rows.empty()) return at::empty({0, slice}, options);
  return rows.size() == 1 ? rows[0].unsqueeze(0) : at::stack(rows);
}

// Each rank sends each other its slice of the rows. Then a rank has all rows of its own slice, and adds them.
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

}  // namespace lockstep
