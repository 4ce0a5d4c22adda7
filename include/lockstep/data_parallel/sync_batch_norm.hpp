// SyncBatchNorm: BatchNorm over the samples of all ranks, equal to one device's BatchNorm on the whole batch.
//
// In training mode all ranks must run the same layers in the same order, in forward and in backward, also those with an
// empty part: DataParallel::loss() passes their empty batch through the network. In eval mode nothing is exchanged: the
// running statistics are used, which are equal on all ranks. Used by its rank's thread only, until run() ends. Cost per
// layer: an allgather of two numbers per channel in forward, an allreduce of as many in backward.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>
#include <lockstep/ranks/rank.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>

namespace lockstep {

// Parameters and buffers have the names, and behave as those, of torch::nn::BatchNorm1d, 2d and 3d.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  // The ranks are those of `rank`: of a run, or of a group such as a Mesh's data axis. One whose other calls may come
  // in between on some ranks and not on others must not be shared with them: see Rank::group.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Rank& rank);

  // With the options, the mode and the tensors themselves of a BatchNorm1d, 2d or 3d, whose place it can take.
  template <size_t D, class Derived>
  SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Derived>& norm, Rank& rank)
      : SyncBatchNormImpl(norm.options, rank) {
    take(norm.weight, norm.bias, {norm.running_mean, norm.running_var, norm.num_batches_tracked});
    train(norm.is_training());
  }

  // x is [n, channels] to [n, channels, depth, height, width]; n may differ from rank to rank, and be 0. bfloat16 and
  // float16 are normalised with statistics in float32. Can be differentiated once. Throws Error: another shape; on CPUs
  // a batch of all ranks with fewer than 2 values per channel (on GPUs the running variance becomes NaN); and as Rank's
  // collectives do. Without running statistics (track_running_stats(false)) eval mode normalises over the rank's own
  // samples.
  torch::Tensor forward(const torch::Tensor& x);
  void pretty_print(std::ostream& out) const override;

 protected:
  void _check_input_dim(const torch::Tensor& x) override;

 private:
  void take(const torch::Tensor& its_weight, const torch::Tensor& its_bias,
            const std::array<torch::Tensor, 3>& its_buffers);
  void follow(const torch::Tensor& mean, const torch::Tensor& variance);

  Rank rank_;
};
TORCH_MODULE(SyncBatchNorm);

// Replaces each BatchNorm1d, 2d and 3d that is a layer of a torch::nn::Sequential or of a ResidualBlock, however deep
// in `module`, by a SyncBatchNorm over a group of its own of all of `rank`'s ranks. It takes over the tensors
// themselves (so optimizers stay valid), the options and the mode. Returns how many it has replaced. All ranks must
// call it with equal modules, before they are trained. Throws Error, before anything is changed: a BatchNorm in another
// place, such as a module's own member, which C++ does not let be replaced by another type (the text names it): build
// that module with a SyncBatchNorm.
int64_t convert_sync_batchnorm(torch::nn::Module& module, Rank& rank);

// Whether `module` is a SyncBatchNorm or holds one.
bool has_sync_batchnorm(const torch::nn::Module& module);

}  // namespace lockstep
