// Gathered computes a layer whole, between slices.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include <cstdint>

namespace lockstep {

// Says how an activation lies on the ranks.
struct Activation {
  bool in_slices = false;  // false: whole
  int64_t dim = -1;   // the split dimension: 1 of [n, channels, height, width], or the last, which has the features
  int64_t total = 0;  // the dimension's whole size; rank i has part_of(total, i, world_size); 0: slices are equal

  at::Tensor gathered(const at::Tensor& x, Rank& rank) const;
};

// Calls `layer`, and gathers its input, the result, or neither. All ranks compute the same afterwards. Parameters,
// buffers and children have the layer's own names, as if Gathered were the layer.
class GatheredImpl : public torch::nn::Module, public Sliced {
 public:
  GatheredImpl(torch::nn::AnyModule layer, const Activation& input, const Activation& output, const Rank& rank);

  at::Tensor forward(const at::Tensor& x);
  void train(bool on = true) override;

 private:
  torch::nn::AnyModule layer_;
  const Activation input_, output_;
  Rank rank_;
};
TORCH_MODULE(Gathered);

}  // namespace lockstep
