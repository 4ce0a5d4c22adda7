// Recorded: the training step of a loop of your own, recorded once as a CUDA graph and then replayed.
//
//   lockstep::DataParallel net(MyNet(), rank);
//   lockstep::Optimizer adam(net, torch::optim::AdamOptions(1e-3));
//   lockstep::Recorded step(net, adam, F::cross_entropy);
//   for (auto& batch : …) step(batch);
//
// The host needs longer to queue the kernels of a small network's step than the GPU to run the kernels. A replay queues
// all of them with one call. Call a Recorded from its rank's thread only. Cost: a copy of each tensor of a batch on the
// GPU, and the memory of one step, kept.
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
  // Takes what net.loss(batch, criterion) takes; a loss with options as Criterion(F::cross_entropy, options). Keep the
  // optimizer longer than the Recorded. Let the criterion and the module's forward do the same work in each step, and
  // read no tensor's value: in a replay neither is called. LibTorch's SGD, Adam and AdamW (see Optimizer) are in the
  // graph; other optimizers step after each replay. CPUs, and GPUs other than CUDA's, record nothing: each step is
  // computed as in a loop without a Recorded.
  //
  // Batches of as many samples as the first one are recorded, after three ordinary steps, and must have its shapes.
  // Batches of more or fewer samples are computed without the graph.
  // Ordinary steps of the same net and optimizer may come between. Learning rates may change, and weights may be set in
  // place. But the step is recorded anew, after three ordinary steps and a wait for the GPU, when something changes
  // that a graph holds: another option of the optimizer, a layer's mode, what is frozen, or tensors that a load() has
  // replaced.
  //
  // Throws Error: the optimizer of another net; StepOptions::skip_not_finite, for which the host would wait;
  // Sharded::parameters; a grain_check; an elastic run; a second Recorded of the optimizer. On ranks that share a GPU
  // without NCCL also what exchanges within the step: a grain, a sharded net, a SyncBatchNorm, and, when it is
  // recorded, a MeanOver.
  template <class Module, class OfBatch>
  Recorded(DataParallel<Module>& net, Optimizer& optimizer, OfBatch criterion, const StepOptions& options = {})
      : Recorded(
            net.replica(), optimizer,
            [net, criterion = std::move(criterion)](const Batch& batch) mutable { return net.loss(batch, criterion); },
            options) {}
  ~Recorded();
  Recorded& operator=(Recorded&&) = delete;

  // Clears the gradients, computes those of this rank's part of the batch, averages them over the ranks, and updates
  // the parameters. Returns Loss::value(), detached. Give whole batches: each call is a step, and no gradients
  // are accumulated over parts. For mixed precision keep an Autocast during the call. Call it on all ranks. Throws as
  // Loss::backward() and Optimizer::step() do, if a batch's tensors are of other shapes than the recorded batch's, and
  // if the step cannot be recorded; the text says why.
  at::Tensor operator()(const Batch& batch);

 private:
  class Step;
  Recorded(const std::shared_ptr<Replica>& replica, Optimizer& optimizer, std::function<Loss(const Batch&)> loss_of,
           const StepOptions& options);

  const std::unique_ptr<Step> step_;
};

}  // namespace lockstep
