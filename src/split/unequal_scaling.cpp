#include "unequal_scaling.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "data_parallel/flat_view.hpp"
#include "ranks/gather.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

constexpr int64_t kChecksOfEachStep = 100, kChecksOneIn = 10;
constexpr double kTolerance = 0.01;  // of bfloat16's factors, and the norms of parts differ by more
constexpr int64_t kFewest = 8;       // elements: a change of fewer looks like a scaling whatever it was

double rounding_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 1e-13;  // the factor itself is a quotient of sums in this type
    case at::kHalf:
      return std::numeric_limits<at::Half>::epsilon();
    case at::kBFloat16:
      return std::numeric_limits<at::BFloat16>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

struct Factors {
  double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;
};

// Nothing if `now` is no multiple of `before`, within the type's rounding, or zero: zero_grad(false) does that.
Factors factor_between(const at::Tensor& before, const at::Tensor& now) {
  if (same_values(before, now)) return {1, 1};
  const at::Tensor from = before.to(at::kDouble), to = now.to(at::kDouble);
  const double factor = ((from * to).sum() / (from * from).sum()).item<double>();
  const at::Tensor largest_error = 4 * rounding_of(before.scalar_type()) * from.abs().max();
  const bool is_multiple = ((to - from * factor).abs() <= largest_error).all().item<bool>();  // false for a NaN
  return is_multiple && factor != 0 ? Factors{factor, factor} : Factors();
}

Factors of_axis(Rank& axis, const Factors& here) {
  if (axis.world_size() == 1) return here;
  const at::Tensor all = of_all_ranks(axis, {bits_of(here.lowest), bits_of(here.highest)});
  Factors factors;
  for (int rank = 0; rank < axis.world_size(); ++rank) {
    factors.lowest = std::min(factors.lowest, std::bit_cast<double>(all[rank][0].item<int64_t>()));
    factors.highest = std::max(factors.highest, std::bit_cast<double>(all[rank][1].item<int64_t>()));
  }
  return factors;
}

}  // namespace

bool UnequalScaling::compares() {
  if (mesh_.tensor().world_size() == 1 && mesh_.pipeline().world_size() == 1) return false;
  if (!mesh_.tensor().device().is_cpu()) return notes_ <= kChecksOnGpu;
  return notes_ <= kChecksOfEachStep || notes_ % kChecksOneIn == 0;
}

// It takes the smallest gradient that says something: zeros stay zeros.
void UnequalScaling::note(const torch::nn::Module& module) {
  ++notes_;
  gradient_.reset();
  noted_ = compares();
  if (!noted_) return;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) {
    const at::Tensor gradient = parameter.grad();
    if (gradient.defined() && gradient.numel() >= kFewest) gradients.push_back(gradient);
  }
  std::stable_sort(gradients.begin(), gradients.end(),
                   [](const auto& a, const auto& b) { return a.numel() < b.numel(); });
  for (const auto& gradient : gradients) {
    if (!gradient.any().item<bool>()) continue;
    gradient_ = gradient;
    value_ = gradient.clone();
    return;
  }
}

void UnequalScaling::check() {
  if (!std::exchange(noted_, false)) return;
  const c10::NoGradGuard no_grad;
  const Factors here = gradient_.defined() ? factor_between(value_, gradient_) : Factors();
  gradient_.reset();
  value_.reset();
  const Factors factors = of_axis(mesh_.pipeline(), of_axis(mesh_.tensor(), here));
  if (factors.highest - factors.lowest <= kTolerance * std::abs(factors.highest)) return;  // -inf if none says anything
  Classic<std::ostringstream> text;
  text << mesh_.tensor().name()
       << ": SplitModel: since the last backward the ranks scaled their gradients by different "
       << "factors, from " << factors.lowest << " to " << factors.highest
       << ", and the weights are wrong from there on. "
       << "torch::nn::utils::clip_grad_norm_ does so, since it sees the norm of this rank's part alone. Clip with "
       << "a lockstep::Optimizer of the net, by step({.clip = max_norm}): its norm is the whole network's";
  throw Error(text.str());
}

}  // namespace lockstep
