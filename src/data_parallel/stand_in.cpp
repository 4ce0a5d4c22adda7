#include "stand_in.hpp"

#include <ATen/ops/cat.h>
#include <lockstep/base/error.hpp>

#include "data/batch_tensors.hpp"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

// The first `count` rows; if there are fewer, the first one again in the place of the others.
at::Tensor rows_of(const at::Tensor& tensor, int64_t count) {
  if (tensor.size(0) >= count) return tensor.slice(0, 0, count).clone();
  return at::cat(std::vector<at::Tensor>(static_cast<size_t>(count), tensor.slice(0, 0, 1)));
}

}  // namespace

Batch stand_in_for(const Batch& part, const Rank& rank) {
  Batch stand_in = part;
  if (part.size() == 0) {
    if (!part.like.x.defined()) {
      throw Error(rank.name() +
                  ": DataParallel: this rank has no samples of the batch, and with a ShardedOptimizer of stage 3 all "
                  "ranks compute the layers. It needs an example for that: take batches(), or give one sample in "
                  "Batch::like");
    }
    stand_in.x = part.like.x;
    stand_in.y = part.like.y;
    stand_in.more = part.like.more;
  }
  const int64_t count = std::min<int64_t>(part.grain, 2);
  stand_in = with_each_tensor(std::move(stand_in), [&](const at::Tensor& tensor) { return rows_of(tensor, count); });
  stand_in.first = 0;
  return stand_in;
}

}  // namespace lockstep
