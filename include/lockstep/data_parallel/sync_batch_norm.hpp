// SyncBatchNorm: BatchNorm over the samples of all ranks, equal to one device's BatchNorm on the whole batch.
//
// In training mode run the same layers in the same order on all ranks, in forward and in backward. This includes ranks
// with an empty part: DataParallel::loss() passes their empty batch through the network. In eval mode nothing is
// exchanged: the running statistics are used, which are equal on all ranks. Use the layer from its rank's thread only,
// until run() ends. Cost per layer: an allgather of two numbers per channel in forward, and an allreduce of as many in
// backward.
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

// Parameters and buffers have the same names as in torch::nn::BatchNorm1d, 2d and 3d, and behave alike.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  // Normalises over the ranks of `rank`: those of a run, or of a group such as a Mesh's data axis. If some ranks may
  // make other calls through `rank` in between, and others not, give this layer a group of its own: see Rank::group.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Rank& rank);

  // Takes the options, the mode and the tensors, not copies, of a BatchNorm1d, 2d or 3d, and can replace it.
  template <size_t D, class Derived>
  SyncBatchNormImpl(const torch::nn::BatchNormImplBase<D, Derived>& norm, Rank& rank)
      : SyncBatchNormImpl(norm.options, rank) {
    take(norm.weight, norm.bias, {norm.running_mean, norm.running_var, norm.num_batches_tracked});
    train(norm.is_training());
  }

  // x is [n, channels] to [n, channels, depth, height, width]; n may differ between ranks, and may be 0. For bfloat16
  // and float16 the statistics are float32. It can be differentiated once. Without running statistics
  // (track_running_stats(false)) eval mode normalises over the rank's own samples. Throws Error for another shape, and
  // as Rank's collectives do. On CPUs it also throws if all ranks together have fewer than 2 values per channel; on
  // GPUs the running variance becomes NaN.
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

// Tells whether `module` is a SyncBatchNorm or holds one.
bool has_sync_batchnorm(const torch::nn::Module& module);

}  // namespace lockstep
