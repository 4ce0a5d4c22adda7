// Recorded: the training step of a loop of your own, recorded once as a CUDA graph and then replayed.
//
//   lockstep::DataParallel net(MyNet(), rank);
//   lockstep::Optimizer adam(net, torch::optim::AdamOptions(1e-3));
//   lockstep::Recorded step(net, adam, F::cross_entropy);
//   for (auto& batch : …) step(batch);
//
// A step of a small network is hundreds of short kernels. The host needs longer to queue the kernels than the GPU to
// run them. A replay queues all of them with one call, and gives the same bits. On a CPU steps are computed as without
// a Recorded. Call a Recorded from its rank's thread only. Cost: a copy of each batch on the GPU, and the memory of one
// step, kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include <functional>
#include <memory>
#include <utility>

namespace lockstep {

class Recorded {
 public:
  // Takes what net.loss(batch, criterion) takes. The first batch's size is that of the batches that are recorded; the
  // first three steps, and those of other sizes, are computed without the graph. Let the criterion and the module's
  // forward do the same work in each step on tensors of the same shapes, and read no tensor's value: in a replay
  // neither is called. Open an Autocast in the criterion or the forward, and not around the step. LibTorch's SGD, Adam
  // and AdamW (see Optimizer) are in the graph; other optimizers step after each replay. Learning rates may change.
  // After a change of other options of the optimizer, of a layer's mode, or of what is frozen the step is recorded
  // anew.
  //
  // Throws Error: the optimizer of another net; StepOptions::skip_not_finite, for which the host would wait;
  // Sharded::parameters. On ranks that share a GPU without NCCL also what exchanges within the step: a grain, a sharded
  // net, a SyncBatchNorm.
  template <class Module, class OfBatch>
  Recorded(DataParallel<Module>& net, Optimizer& optimizer, OfBatch criterion, const StepOptions& options = {})
      : Recorded(
            net.replica(), optimizer,
            [net, criterion = std::move(criterion)](const Batch& batch) mutable { return net.loss(batch, criterion); },
            options) {}
  ~Recorded();
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

  // Clears the gradients, computes those of this rank's part of the batch, averages them over the ranks, and updates
  // the parameters. Returns the part's mean loss. Call it on all ranks. Throws as Loss::backward() and
  // Optimizer::step() do, and if the step cannot be recorded; the text says why.
  at::Tensor operator()(const Batch& batch);

 private:
  class Step;
  Recorded(const std::shared_ptr<Replica>& replica, Optimizer& optimizer, std::function<Loss(const Batch&)> loss_of,
           const StepOptions& options);

  const std::unique_ptr<Step> step_;
};

}  // namespace lockstep
