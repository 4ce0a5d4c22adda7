#include "criterion_check.hpp"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "base/number_text.hpp"
#include "base/rank_thread.hpp"
#include "data/batch_tensors.hpp"
#include "devices/cuda_graph.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>
#include <vector>

namespace lockstep {
namespace {

constexpr int kLosses = 3;  // a mean by chance in one loss is none in the next
constexpr int kSeen = 12;

// The halves add up in another order. 16 bits round once per sample.
struct Tolerance {
  double of_value, of_output;
};
constexpr Tolerance kWide{2e-4, 1e-5}, kNarrow{3e-2, 1e-2};

// Tells whether the criterion did something that calling it again would change.
class CriterionTraces {
 public:
  CriterionTraces(const Rank& rank, const at::Tensor& y_hat, const Batch& batch)
      : rank_(rank), y_hat_(y_hat), y_(batch.y), before_(states()) {}

  bool are_none() const {
    const States after = states();
    return after.numbers == before_.numbers &&
           std::equal(after.generators.begin(), after.generators.end(), before_.generators.begin(),
                      [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); });
  }

 private:
  struct States {
    std::vector<int64_t> numbers;  // the versions of the arguments, and the thread's calls to other ranks
    std::vector<at::Tensor> generators;
  };
  States states() const {
    std::vector<at::Generator> generators{rank_.generator(), at::globalContext().defaultGenerator(at::kCPU)};
    if (rank_.device().is_cuda()) generators.push_back(at::globalContext().defaultGenerator(rank_.device()));
    const auto version = [](const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); };
    States states{{version(y_hat_), version(y_), calls_of_this_thread()}, {}};
    for (auto& generator : generators) {
      if (!generator.defined()) continue;
      const std::lock_guard lock(generator.mutex());
      states.generators.push_back(generator.get_state());
    }
    return states;
  }

  const Rank& rank_;
  const at::Tensor y_hat_, y_;
  const States before_;
};

Batch rows_of(const Batch& batch, const std::function<at::Tensor(const at::Tensor&)>& rows) {
  return with_each_tensor(batch, [&](const at::Tensor& tensor) { return tensor.defined() ? rows(tensor) : tensor; });
}

bool has_halves(const at::Tensor& y_hat, const Batch& batch) {
  const auto rows = [](const at::Tensor& tensor) { return tensor.defined() && tensor.dim() > 0 ? tensor.size(0) : 0; };
  return rows(y_hat) >= 2 && rows(y_hat) == rows(batch.y);
}

void check_mean_of_halves(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch,
                          const at::Tensor& whole, const std::string& what, const std::string& option) {
  const int64_t samples = y_hat.size(0), half = samples / 2;
  double first = 0, second = 0, largest = 0;
  try {
    const auto value_of = [&](const std::function<at::Tensor(const at::Tensor&)>& rows) {
      return criterion(rows(y_hat.detach()), rows_of(batch, rows)).item<double>();
    };
    // A criterion that captures the whole batch throws for some of its rows. Not for one row, which is broadcast.
    if (samples == 2) value_of([](const at::Tensor& tensor) { return at::cat({tensor, tensor.slice(0, 0, 1)}); });
    second = value_of([&](const at::Tensor& tensor) { return tensor.slice(0, half, samples); });
    first = value_of([&](const at::Tensor& tensor) { return tensor.slice(0, 0, half); });
    largest = y_hat.abs().max().item<double>();
  } catch (const std::exception&) {  // it needs all samples, or gradients
    return;
  }
  const auto value = whole.item<double>();
  const auto joined =
      (first * static_cast<double>(half) + second * static_cast<double>(samples - half)) / static_cast<double>(samples);
  const Tolerance tolerance = whole.element_size() < 4 ? kNarrow : kWide;
  const double allowed = tolerance.of_value * std::max({std::abs(value), std::abs(first), std::abs(second)}) +
                         tolerance.of_output * largest;
  if (!(std::abs(value - joined) > allowed)) return;  // also where one is no number
  throw Error(
      what + " is no mean over samples: of " + std::to_string(samples) + " samples it gives " + number_text(value) +
          ", and of their halves " + number_text(first) + " and " + number_text(second) + ", on average " +
          number_text(joined) +
          ". The parts of a batch are averaged, so the result would depend on how batches are divided. For a mean over "
          "tokens, pixels or weights give lockstep::MeanOver(sum, of), with the sum; for cross_entropy of targets of "
          "-100 give the loss with its options, F::CrossEntropyFuncOptions(). Divide a sum over samples by those that "
          "the function is given, y_hat.size(0). For a loss of all samples together see docs/guide/losses.md. If it "
          "keeps a state, or is meant so, give lockstep::Criterion::unchecked(function)",
      {.options = {option}});
}

}  // namespace

at::Tensor compared_with_halves(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch,
                                const Rank& rank, const std::string& what, const std::string& option, bool& compares) {
  if (!criterion.is_checked() || !has_halves(y_hat, batch) || (rank.device().is_cuda() && is_recording()))
    return criterion(y_hat, batch);
  const CriterionTraces traces(rank, y_hat, batch);
  at::Tensor value = criterion(y_hat, batch);
  if (!value.defined() || value.numel() != 1 || !traces.are_none()) return value;
  compares = false;
  const c10::NoGradGuard no_grad;
  check_mean_of_halves(criterion, y_hat, batch, value.detach(), what, option);
  return value;
}

// Without gradients a loss is only looked at, or computed again for its backward.
at::Tensor CriterionCheck::loss(const Criterion& criterion, const at::Tensor& y_hat, const Batch& batch) {
  if (!criterion.is_checked() || !c10::GradMode::is_enabled()) return criterion(y_hat, batch);
  const std::type_index type = criterion.function().type();
  const auto found = std::find_if(losses_.begin(), losses_.end(), [&](const Losses& of) { return of.type == type; });
  Losses& losses = found == losses_.end() ? losses_.emplace_back(Losses{type}) : *found;
  if (losses.checked >= kLosses || losses.seen >= kSeen) return criterion(y_hat, batch);
  ++losses.seen;
  bool compares = true;
  at::Tensor mean =
      compared_with_halves(criterion, y_hat, batch, rank_, rank_.name() + ": the criterion", "criterion", compares);
  if (!compares) ++losses.checked;
  return mean;
}

}  // namespace lockstep
