// The programs of this folder have a mistake each. tests/scripts/compile_errors_test.py compiles them.
#pragma once

#include <torch/torch.h>
#include <lockstep/lockstep.hpp>

#include <tuple>

namespace F = torch::nn::functional;
using lockstep::Rank;
using torch::Tensor;

struct Net : torch::nn::Module {
  Tensor forward(const Tensor& x) { return layer(x); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 3));
};

struct TwoOutputs : Net {
  std::tuple<Tensor, Tensor> forward(const Tensor& x) { return {layer(x), x}; }
};

struct TwoInputs : Net {
  Tensor forward(const Tensor& x, const Tensor& mask) { return layer(x * mask); }
};

extern const lockstep::Dataset data;
extern const lockstep::Batch batch;
