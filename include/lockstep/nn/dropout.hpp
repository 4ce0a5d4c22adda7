// Dropout: drops values by masks that depend neither on the rank nor on the number of ranks.
//
// torch::nn::Dropout draws from LibTorch's default generator, which all ranks of a process share. So each run on
// several ranks drops different values. Here a function decides whether a value is dropped, the same on every device.
// Its arguments are the run's seed (RunOptions::seed), the step, the layer's name, the sample's place in the global
// batch, and the value's place in the sample. So 1, 2 and 4 ranks train the same, in parts, in microbatches, split by
// channels, and after a resume.
//
// Whole batches that add up in one step, under no_sync(), drop different values. A forward that is computed again in
// the same step drops the same values. A second call of a layer in one forward drops others. Use a layer from one
// thread at a time. Cost: a dozen passes over as many integers as x has values.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>

namespace lockstep {

class DropoutImpl : public torch::nn::Cloneable<DropoutImpl> {
 public:
  struct Options {
    double p = 0.5;               // the probability that a value becomes zero; the others grow by 1 / (1 - p)
    bool whole_channels = false;  // drops whole channels of x [n, channels, height, width], as torch::nn::Dropout2d

    // Says that the layer's x is a rank's slice of a whole activation, as shard() makes it: along `dim`, slice `index`
    // of `count` near-equal ones. `total` is the whole activation's size there; 0: all slices are equal.
    struct Slice {
      int64_t dim = -1;
      int64_t total = 0;
      int index = 0;
      int count = 1;
    };
    std::optional<Slice> slice = {};
  };

  // Throws Error if p is not in [0, 1].
  explicit DropoutImpl(double p = 0.5) : DropoutImpl(Options{.p = p}) {}
  explicit DropoutImpl(const Options& options);
  void reset() override {}

  // Drops values in training, and otherwise returns x. Give x [n, ...]: the scope's samples in order, with one or
  // several rows for each. In a rank's thread DataParallel::loss() tells the layer its samples. Before a forward of
  // your own write `const auto scope = net.samples(batch);`, with a batch from batches(), or `worker.samples(batch)`
  // with a ParameterServer. Outside of run() the layer draws from LibTorch's default generator.
  //
  // Throws Error, which says what to do: there is no scope; the scope does not know its samples' place; n is no
  // multiple of the scope's samples; or a CUDA graph is recorded, which would repeat one mask.
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& out) const override;

  // Two layers with one name drop the same values. A layer without a name is known by its turn in the forward.
  void set_name(std::string name) { name_ = std::move(name); }

  Options options;

 private:
  at::Tensor mask(const at::Tensor& x) const;

  std::string name_;
};
TORCH_MODULE(Dropout);

using DropoutOptions [[deprecated("lockstep::DropoutImpl::Options")]] = DropoutImpl::Options;

}  // namespace lockstep
