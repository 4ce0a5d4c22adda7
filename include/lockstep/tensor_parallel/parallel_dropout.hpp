// ParallelDropout: dropout that drops the same values whatever the number of ranks.
//
// torch::nn::Dropout draws from LibTorch's default generator, which all ranks of a process share: each would drop other
// values of an activation that must be equal on all, and results would depend on how an activation is split. Here each
// rank draws the mask of the whole activation, from a generator of the layer's own that is seeded alike on all ranks,
// and takes its slice. Cost: the whole activation's random numbers on every rank; nothing is sent. Used by its rank's
// thread only. Dropout (dropout.hpp) needs no rank, and drops the same whatever the number of replicas too. A forward
// that is computed again (as activation recomputation does) draws another mask.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

struct ParallelDropoutOptions {
  double p = 0.5;               // of each value to become zero; the others grow by 1 / (1 - p)
  bool whole_channels = false;  // true: as torch::nn::Dropout2d, whole channels of x [n, channels, height, width]
  uint64_t seed = 0;            // equal on all ranks; LibTorch's CPU generator takes its low 32 bits

  bool input_is_parallel = false;  // x is this rank's slice along `dim`; false: x is whole
  int64_t dim = -1;
  int64_t total = 0;  // the whole's size along `dim`, of which rank i has part_of(total, i, world_size);
                      // 0: slices are equal
};

class ParallelDropoutImpl : public torch::nn::Module {
 public:
  // Throws Error: p that is not in [0, 1].
  ParallelDropoutImpl(const ParallelDropoutOptions& options, Rank& rank);

  at::Tensor forward(const at::Tensor& x);  // in training; otherwise x

 private:
  const ParallelDropoutOptions options_;
  const Rank rank_;
  at::Generator generator_;
};
TORCH_MODULE(ParallelDropout);

}  // namespace lockstep
