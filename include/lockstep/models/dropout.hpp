// Dropout: dropout whose masks depend neither on the rank nor on the number of ranks.
//
// torch::nn::Dropout draws from LibTorch's default generator, which all ranks of a process share: each run on several
// ranks drops different values. Here whether a value is dropped is a function of the run's seed (RunOptions::seed), the
// step, the layer's name, the place of its sample in the global batch and its own place in the sample, on every device.
// So 1, 2 and 4 ranks train the same, in parts, in microbatches, split by channels, and after a resume. Whole batches
// that add up in one step, under no_sync(), drop different values. A forward that is computed again in the same step
// drops the same; a second call of a layer in one forward drops different values.
// Used by one thread at a time. Cost: a dozen passes over whole numbers of as many values as x has.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>

namespace lockstep {

struct DropoutOptions {
  double p = 0.5;               // of each value to become zero; the others grow by 1 / (1 - p)
  bool whole_channels = false;  // true: as torch::nn::Dropout2d, whole channels of x [n, channels, height, width]

  // Of a layer whose x is a rank's slice of a whole one, as shard() makes it: of `count` ranks' slices number `index`,
  // along `dim`, part_of(total, index, count). total 0: slices are equal.
  struct Slice {
    int64_t dim = -1;
    int64_t total = 0;
    int index = 0;
    int count = 1;
  };
  std::optional<Slice> slice = {};
};

class DropoutImpl : public torch::nn::Cloneable<DropoutImpl> {
 public:
  // Throws Error: p that is not in [0, 1].
  explicit DropoutImpl(double p = 0.5) : DropoutImpl(DropoutOptions{.p = p}) {}
  explicit DropoutImpl(const DropoutOptions& options);
  void reset() override {}

  // In training; otherwise x. x is [n, ...]: the scope's samples in their order, or several rows of each. In a rank's
  // thread DataParallel::loss() tells it the samples; before a forward of your own write `const auto scope =
  // net.samples(batch);`, with a batch from batches(), and with a ParameterServer worker.samples(batch). Outside of
  // run() it draws from LibTorch's default generator.
  // Throws Error that says what to do: no scope, one that does not know its samples' place, an n that is no multiple of
  // the scope's samples, a recording as a CUDA graph, which would repeat one mask.
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& out) const override;

  // Two layers of one name drop the same. A layer without a name goes by its turn in the forward.
  void set_name(std::string name) { name_ = std::move(name); }

  DropoutOptions options;

 private:
  at::Tensor mask(const at::Tensor& x) const;

  std::string name_;
};
TORCH_MODULE(Dropout);

// Gives every Dropout in `module` its name there. DataParallel, Pipeline and ParameterServer do it, and shard().
void name_dropouts(torch::nn::Module& module);

}  // namespace lockstep
