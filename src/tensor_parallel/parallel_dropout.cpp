#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/parts.hpp>
#include <lockstep/tensor_parallel/parallel_dropout.hpp>

#include "ranks/rank_generators.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace lockstep {

ParallelDropoutImpl::ParallelDropoutImpl(const ParallelDropoutOptions& options, Rank& rank)
    : options_(options), rank_(rank), generator_(generator_on(rank.device(), options.seed)) {
  if (options_.p >= 0 && options_.p <= 1) return;
  throw Error("ParallelDropout: p is " + std::to_string(options_.p) + "; it must be from 0 to 1");
}

at::Tensor ParallelDropoutImpl::forward(const at::Tensor& x) {
  if (!is_training() || options_.p == 0) return x;
  const double kept = 1 - options_.p;
  if (kept == 0) return x * 0;

  std::vector<int64_t> sizes = x.sizes().vec();  // of the mask of the whole
  const int64_t dim = at::maybe_wrap_dim(options_.dim, x.dim());
  if (options_.input_is_parallel) sizes[dim] = options_.total > 0 ? options_.total : x.size(dim) * rank_.world_size();
  if (options_.whole_channels) std::fill(sizes.begin() + std::min<int64_t>(2, x.dim()), sizes.end(), 1);
  at::Tensor mask = at::empty(sizes, x.options().requires_grad(false)).bernoulli_(kept, generator_).div_(kept);
  if (options_.input_is_parallel) {
    const Range part = part_of(sizes[dim], rank_.index(), rank_.world_size());
    mask = mask.narrow(dim, part.begin, part.size());
  }
  return x * mask;
}

}  // namespace lockstep
