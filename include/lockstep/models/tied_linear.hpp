// TiedLinear is a linear layer whose weight is a parameter of another layer, such as a head with the embedding's weight
// (Press and Wolf 2017, "Using the Output Embedding to Improve Language Models").
//
//   net->push_back("words", torch::nn::Embedding(256, 64));
//   net->push_back("head", lockstep::TiedLinear("words.weight"));
//   lockstep::tie_layers(*net);
//
// The parameter belongs to its own layer alone: optimizers, checkpoints and ranks see it once. SplitModel keeps
// the tie, also where the two layers are on different ranks. Use it from one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <iosfwd>
#include <string>
#include <utility>

namespace lockstep {

// This is the base class of layers that compute with a parameter of another layer.
class Tied {
 public:
  // `parameter` is the parameter's name, as the network's named_parameters() has it: "words.weight".
  explicit Tied(std::string parameter) : parameter_(std::move(parameter)) {}
  virtual ~Tied() = default;

  const std::string& tied_to() const { return parameter_; }

  // Makes the layer compute with this tensor from now on; tie_layers() calls this. An undefined tensor undoes the tie.
  void tie(at::Tensor parameter) { weight_ = std::move(parameter); }
  bool is_tied() const { return weight_.defined(); }

  // Throws Error, which says what to do, if nobody has tied the layer.
  const at::Tensor& tied_weight() const;

 private:
  std::string parameter_;
  at::Tensor weight_;  // the other layer's tensor; not a parameter of this layer
};

// Maps x [..., in] to [..., out], without a bias, by a weight [out, in]. A clone is not tied: call tie_layers()
// with the network that contains the clone.
class TiedLinearImpl : public torch::nn::Cloneable<TiedLinearImpl>, public Tied {
 public:
  explicit TiedLinearImpl(std::string parameter) : Tied(std::move(parameter)) {}
  at::Tensor forward(const at::Tensor& x);
  void reset() override { tie({}); }  // a clone must not compute with the original net's weight
  void pretty_print(std::ostream& out) const override;
};
TORCH_MODULE(TiedLinear);

// Ties every Tied layer in `net` to the parameter of that name in `net`. Throws Error for a name that `net` does not
// have.
void tie_layers(torch::nn::Module& net);

}  // namespace lockstep
