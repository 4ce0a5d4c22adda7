#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/evaluate.hpp>

#include "data/parts.hpp"
#include "evaluate_sums.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace lockstep {
namespace {

// The last grain of a batch may be smaller. With batches of whole grains only the data's last grain is.
int64_t in_whole_grains(int64_t batch_size, int64_t grain) {
  if (grain < 0)
    throw Error("evaluate: the grain is " + std::to_string(grain) + " samples; give 1 or more, or 0 for none");
  return grain == 0 || batch_size < 1 ? batch_size : (batch_size + grain - 1) / grain * grain;
}

void check_widths(const std::vector<int64_t>& some, const std::vector<int64_t>& others) {
  if (some == others) return;
  throw Error(
      "evaluate: a sum has another number of values than in another batch or on another rank; give rows of one length "
      "for any samples, such as bincount(weights, classes)",
      {.options = {"criteria"}});
}

}  // namespace

std::vector<std::vector<double>> evaluate_sums(const std::function<at::Tensor(const Batch&)>& forward,
                                               const Samples& samples, const std::vector<SampleSum>& sums, Rank& rank,
                                               int64_t batch_size, int64_t grain) {
  const c10::NoGradGuard no_grad;
  const int64_t size = in_whole_grains(batch_size, grain);
  // The table has a row for each grain of the data, which one rank fills, so that the ranks' sum is exact. Without a
  // grain it has one row.
  const int64_t rows = grain == 0 ? 1 : std::max<int64_t>(1, (samples.size() + grain - 1) / grain);
  const auto options = at::TensorOptions(rank.device()).dtype(at::kDouble);
  std::vector<int64_t> widths(sums.size(), 0);  // the numbers of each sum; zeros: this rank got no sample
  at::Tensor table;
  const auto add = [&](const Batch& batch, int64_t row) {
    const at::Tensor y_hat = forward(batch);
    std::vector<at::Tensor> numbers;
    for (const auto& sum : sums) numbers.push_back(sum(y_hat, batch).to(options).reshape({-1}));
    std::vector<int64_t> these;
    for (const auto& sum : numbers) these.push_back(sum.numel());
    if (!table.defined()) {
      widths = these;
      table = at::zeros({rows, std::accumulate(widths.begin(), widths.end(), int64_t{0})}, options);
    }
    check_widths(these, widths);
    table[row].add_(at::cat(numbers));
  };
  int64_t grains_before = 0;
  for (const auto& batch : batches(samples, {.size = size, .shuffle = false, .grain = grain}, rank)) {
    const int64_t first_row = grains_before;
    if (grain > 0) grains_before += batch.grains();
    if (batch.size() == 0) continue;
    if (grain == 0) {
      add(batch, 0);
      continue;
    }
    const Range own = batch.own_grains();
    for (int64_t number = own.begin; number < own.end; ++number) add(batch.of_grain(number), first_row + number);
  }
  const at::Tensor all_widths = at::tensor(widths, options.dtype(at::kLong));
  rank.allreduce(all_widths, c10d::ReduceOp::MAX);
  const at::Tensor widths_here = all_widths.cpu();
  const auto* const widest = widths_here.const_data_ptr<int64_t>();
  if (table.defined()) check_widths(widths, {widest, widest + sums.size()});
  if (!table.defined()) table = at::zeros({rows, widths_here.sum().item<int64_t>()}, options);
  rank.allreduce(table);

  const at::Tensor here = table.cpu();
  const double* value = here.const_data_ptr<double>();
  std::vector<std::vector<double>> totals;
  for (size_t i = 0; i < sums.size(); ++i) totals.emplace_back(widest[i], 0.0);
  for (int64_t row = 0; row < rows; ++row) {
    for (auto& total : totals) {
      for (double& number : total) number += *value++;
    }
  }
  return totals;
}

Score evaluate(const std::function<at::Tensor(const at::Tensor&)>& forward, const Dataset& dataset, Rank& rank,
               int64_t batch_size, int64_t grain) {
  namespace F = torch::nn::functional;
  if (dataset.size() == 0)
    throw Error("evaluate: the data set has no samples, so there is no accuracy; check what was loaded");
  const SampleSum correct = [](const at::Tensor& logits, const Batch& batch) {
    return (logits.argmax(1) == batch.y).sum();
  };
  const SampleSum loss = [](const at::Tensor& logits, const Batch& batch) {
    return F::cross_entropy(logits, batch.y, F::CrossEntropyFuncOptions().reduction(torch::kSum));
  };
  const auto of_batch = [&](const Batch& batch) { return forward(batch.x); };
  const auto sums = evaluate_sums(of_batch, dataset, {correct, loss}, rank, batch_size, grain);
  Score score;
  score.total = dataset.size();
  score.correct = static_cast<int64_t>(sums[0][0]);
  score.loss = sums[1][0] / static_cast<double>(score.total);
  return score;
}

}  // namespace lockstep
