#include <ATen/ops/full.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/evaluate_criteria.hpp>

#include "base/rank_thread.hpp"
#include "criterion_check.hpp"
#include "data/sizes_text.hpp"
#include "measure.hpp"
#include "ranks/evaluate_sums.hpp"

#include <limits>
#include <string>

namespace lockstep {
namespace {

SampleSum sum_of(const Measure& measure, const Rank& rank) {
  return [measure, rank, compares = true](const at::Tensor& y_hat, const Batch& batch) mutable {
    const at::Tensor values = [&] {
      const InUserCode here(measure.name);
      if (!compares || measure.of.of()) return measure.of.function()(y_hat, batch);
      return compared_with_halves(measure.of, y_hat, batch, rank, rank.name() + ": " + measure.name, measure.option,
                                  compares);
    }();
    const int64_t samples = batch.size();
    if (measure.of.of()) {
      if (values.defined() && values.dim() <= 1) return values;
    } else if (values.defined() && values.numel() == 1) {
      return values.to(at::kDouble) * static_cast<double>(samples);
    } else if (values.defined() && values.dim() == 1 && values.size(0) == samples) {
      return values.sum(at::kDouble);
    }
    throw Error(rank.name() + ": " + measure.name + " gave " +
                    (values.defined() ? "a tensor " + sizes_text(values) : "an undefined tensor") + " for " +
                    std::to_string(samples) + " samples; it must give " +
                    (measure.of.of() ? "their sum, one number or a row with one for each class"
                                     : "a value for each of them, or their mean, one number"),
                {.options = {measure.option}});
  };
}

SampleSum count_of(const Measure& measure) {
  if (const auto& of = measure.of.of()) return [of](const at::Tensor&, const Batch& batch) { return of(batch); };
  return [](const at::Tensor& y_hat, const Batch& batch) {
    return at::full({}, batch.size(), y_hat.options().dtype(at::kLong).requires_grad(false));
  };
}

double mean_of(const std::vector<double>& sums, const std::vector<double>& counts, const Measure& measure) {
  if (sums.size() != counts.size()) {
    throw Error(measure.name + " gives " + std::to_string(sums.size()) + " sums and " + std::to_string(counts.size()) +
                    " counts; give one number for each, or as many",
                {.options = {measure.option}});
  }
  double mean = 0, counted = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (counts[i] == 0) continue;
    mean += sums[i] / counts[i];
    ++counted;
  }
  return counted > 0 ? mean / counted : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

std::vector<double> measure(const std::function<at::Tensor(const Batch& batch)>& forward, const Samples& samples,
                            const std::vector<Measure>& measures, Rank& rank, int64_t batch_size, int64_t grain) {
  std::vector<SampleSum> sums;
  for (const auto& measure : measures) {
    sums.push_back(sum_of(measure, rank));
    sums.push_back(count_of(measure));
  }
  const auto totals = evaluate_sums(forward, samples, sums, rank, batch_size, grain);
  std::vector<double> means;
  for (size_t i = 0; i < measures.size(); ++i) means.push_back(mean_of(totals[2 * i], totals[2 * i + 1], measures[i]));
  return means;
}

std::vector<double> evaluate(const std::function<at::Tensor(const Batch& batch)>& forward, const Samples& samples,
                             const std::vector<Criterion>& criteria, Rank& rank, int64_t batch_size, int64_t grain) {
  if (samples.size() == 0)
    throw Error("evaluate: the data set has no samples, so there is no mean; check what was loaded");
  std::vector<Measure> measures;
  for (const auto& criterion : criteria)
    measures.push_back({"evaluate: criterion " + std::to_string(measures.size()), "criteria", criterion});
  return measure(forward, samples, measures, rank, batch_size, grain);
}

}  // namespace lockstep
