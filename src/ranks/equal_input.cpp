#include "equal_input.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include "devices/cuda_graph.hpp"
#include "gather.hpp"

#include <algorithm>
#include <bit>

namespace lockstep {
namespace {

constexpr int64_t kValues = 1024;   // the fewest values that are read, if there are as many
constexpr int64_t kSums = 8;        // several sums, since one alone may be equal by chance
constexpr double kRounding = 1e-3;  // the tolerance, as a fraction of the sum of the absolute values

// The sums are a cosine transform's, so that they depend on the order of the samples.
at::Tensor sums_of(const at::Tensor& x) {
  const at::Tensor all = x.detach().reshape({-1});
  const int64_t stride = std::max<int64_t>(1, all.numel() / kValues);
  const at::Tensor values = all.slice(0, 0, all.numel(), stride).cpu().to(at::kDouble);
  const at::Tensor places = at::arange(values.numel(), at::kDouble);
  const at::Tensor waves = at::outer(at::arange(1, kSums + 1, at::kDouble), places).cos();
  const at::Tensor size = at::stack({values.abs().sum(), at::full({}, static_cast<double>(all.numel()), at::kDouble)});
  return at::cat({waves.mv(values), size});
}

}  // namespace

std::optional<int> rank_with_another_input(const at::Tensor& x, Rank& rank, int64_t inputs) {
  const bool is_turn = inputs > 1 && std::has_single_bit(static_cast<uint64_t>(inputs));
  const bool waits = !rank.device().is_cpu() && inputs > int64_t{1} << kChecksOnGpu;
  if (rank.world_size() == 1 || !is_turn || waits) return std::nullopt;
  if (rank.device().is_cuda() && is_recording()) return std::nullopt;
  const c10::AutoGradMode no_grad(false);
  const at::Tensor bits = sums_of(x).view(at::kLong);
  const auto* const begin = bits.const_data_ptr<int64_t>();
  const at::Tensor all = of_all_ranks(rank, {begin, begin + bits.numel()}).contiguous().view(at::kDouble);
  const at::Tensor first = all[0];
  for (int other = 1; other < rank.world_size(); ++other) {
    const at::Tensor distance = (all[other] - first).abs();
    const bool as_many = distance[kSums + 1].item<double>() == 0;
    const double scale = std::max(first[kSums].item<double>(), all[other][kSums].item<double>());
    if (!as_many || distance.narrow(0, 0, kSums).gt(kRounding * scale).any().item<bool>()) return other;
  }
  return std::nullopt;
}

}  // namespace lockstep
