#include "counted_batches.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "data/sizes_text.hpp"
#include "data/whole_batch.hpp"
#include "devices/cuda_graph.hpp"
#include "ranks/gather.hpp"

#include <numeric>
#include <string>

namespace lockstep {
namespace {

// Gives a CPU's numbers to look at, which takes less than operators do.
double* numbers_of(const at::Tensor& counts) {
  return counts.mutable_data_ptr<double>();
}

}  // namespace

// The first part counts the whole batch, once for each of its losses. Parts that come again begin anew.
Batch CountedBatches::counted(const Batch& batch, const MeanOver::Count& of) {
  Batch counted = batch;
  if (!batch.whole) {
    counted.samples_per_count = samples_per_count(batch, of);
    return counted;
  }
  check_targets(batch);
  WholeBatch& whole = *batch.whole;
  if (batch.part < whole.part) whole.samples_per_count.clear();
  if (batch.part != whole.part) whole.next = 0;
  whole.part = batch.part;
  if (whole.next == whole.samples_per_count.size())
    whole.samples_per_count.push_back(samples_per_count(whole.batch, of));
  counted.samples_per_count = whole.samples_per_count[whole.next++];
  return counted;
}

void CountedBatches::check_targets(const Batch& part) const {
  const Batch& whole = part.whole->batch;
  bool are_its_own = part.y.is_alias_of(whole.y);
  for (const auto& [name, tensor] : part.more) {
    const auto found = whole.more.find(name);
    are_its_own = are_its_own && found != whole.more.end() && tensor.is_alias_of(found->second);
  }
  if (are_its_own) return;
  throw Error(
      rank_.name() +
          ": MeanOver: targets of a part were changed after in_parts(), and what is counted is that of the whole "
          "batch before. Change the batch's y and `more` first, and then cut it",
      {.options = {"criterion"}});
}

// With a grain each grain has a row, which one rank fills. So the sum has the same bits on any number of ranks.
at::Tensor CountedBatches::counts_here(const Batch& whole, const MeanOver::Count& of) const {
  const int64_t rows = whole.grain > 0 ? whole.grains() : 1;
  const at::Tensor counts = at::zeros({rows + 1}, at::TensorOptions(rank_.device()).dtype(at::kDouble));
  const auto put = [&](int64_t row, const Batch& samples) {
    const at::Tensor count = of(samples);
    if (!count.defined() || count.numel() != 1) {
      throw Error(rank_.name() + ": MeanOver: the count of " + std::to_string(samples.size()) + " samples is " +
                      (count.defined() ? "a tensor " + sizes_text(count) : "undefined") +
                      "; give one number, such as y.ne(padding).sum()",
                  {.options = {"criterion"}});
    }
    if (counts.is_cpu()) {
      numbers_of(counts)[row] = count.item<double>();
    } else {
      counts[row].copy_(count.reshape({}));
    }
  };
  if (whole.grain > 0) {
    const Batch::Range own = whole.own_grains();
    for (int64_t number = own.begin; number < own.end; ++number) put(number, whole.of_grain(number));
  } else if (whole.size() > 0) {
    put(0, whole);
  }
  const auto size = static_cast<double>(whole.size());
  counts.is_cpu() ? void(numbers_of(counts)[rows] = size) : void(counts[rows].fill_(size));
  return counts;
}

at::Tensor CountedBatches::samples_per_count(const Batch& whole, const MeanOver::Count& of) {
  const c10::NoGradGuard no_grad;
  const bool is_recorded = rank_.device().is_cuda() && is_recording();
  if (is_recorded && rank_.world_size() > 1 && rank_.backend().getBackendName() != "nccl") {
    throw Error(rank_.name() +
                    ": MeanOver: ranks that share a GPU count by host code, which no graph holds; give each rank a GPU "
                    "of its own, or compute steps without a graph",
                {.options = {"devices", "cuda_graph"}});
  }
  const at::Tensor counts = counts_here(whole, of);
  if (rank_.world_size() > 1) rank_.allreduce(counts);
  if (rank_.device().is_cpu() || (!is_recorded && ++checked_ <= kChecksOnGpu)) {
    const auto samples = static_cast<int64_t>(counts[-1].item<double>());
    if (samples != whole.global_size) {
      throw Error(rank_.name() + ": MeanOver: the ranks' parts have " + std::to_string(samples) +
                      " samples, and the batch has " + std::to_string(whole.global_size) +
                      ". What is counted must be that of the whole batch: cut it by in_parts()",
                  {.options = {"criterion"}});
    }
  }
  if (counts.is_cpu()) {
    const double* const numbers = numbers_of(counts);
    const double count = std::accumulate(numbers, numbers + counts.numel() - 1, 0.0);
    return at::full({}, count != 0 ? static_cast<double>(whole.global_size) / count : 0, counts.options());
  }
  const at::Tensor count = counts.narrow(0, 0, counts.size(0) - 1).sum();
  return at::where(count != 0, static_cast<double>(whole.global_size) / count, at::zeros_like(count));
}

}  // namespace lockstep
