// Models: the section's LeNet, twice. Once from scratch (a list of weights and a function), once as a module.
//
// Both compute the same function; the module takes the list's weights with load_lenet_params. Thread-safe: no shared
// state. Initialisation draws from a generator of its own, so it depends on the seed alone and not on what other
// threads draw.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

namespace lockstep {

// W1 (20,1,3,3), b1 (20), W2 (50,20,5,5), b2 (50), W3 (800,128), b3 (128), W4 (128,10), b4 (10), in this order, on the
// CPU, float32. Weights are N(0, 0.01^2), biases zero. (With so small weights the loss rests near ln 10 = 2.30 for the
// first epoch.) LibTorch's generator takes the seed's low 32 bits. Section: "A Toy Network".
std::vector<torch::Tensor> lenet_params(uint64_t seed = 0);

// The network's 10 logits [n, 10] for images `x` [n, 1, 28, 28]: numbers in [0, 1], of the parameters' type and on
// their device. Section: `lenet(X, params)` ("A Toy Network"). Throws Error that shows both shapes: images of another
// shape, parameters of another number or shape than lenet_params gives.
torch::Tensor lenet(const torch::Tensor& x, const std::vector<torch::Tensor>& params);

// The same network as a torch::nn::Module: conv1, conv2, fc1, fc2.
class LeNetImpl : public torch::nn::Module {
 public:
  // With the weights of lenet_params(seed): float32 on the CPU.
  explicit LeNetImpl(uint64_t seed = 0);

  // As lenet(): [n, 1, 28, 28] -> logits [n, 10]. Throws Error for images of another shape.
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d conv1, conv2;
  torch::nn::Linear fc1, fc2;
};
TORCH_MODULE(LeNet);

// Copies the list's values into the module (W3 and W4 transposed, as torch::nn::Linear keeps them), converted to its
// type and device. Throws Error, before anything is changed, for a list of another number of parameters or another
// shape: the text shows both.
void load_lenet_params(LeNet& net, const std::vector<torch::Tensor>& params);

}  // namespace lockstep
