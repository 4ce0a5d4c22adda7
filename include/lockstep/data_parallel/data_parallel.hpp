// DataParallel: wraps any torch::nn::Module so that every rank holds an equal replica and gradients are averaged over
// the ranks.
//
// The contract: after net.loss(batch, criterion).backward() every rank's gradients are those of the mean loss over the
// whole global batch, however it was split (uneven and empty parts too), added in a fixed order; equal on all ranks.
// Used by its rank's thread only. Cost: every gradient is averaged once per backward(), in buckets whose allreduces run
// while backward still computes earlier layers' gradients. A parameter's .grad is a view into its bucket: clipping and
// optimizers see ordinary tensors, and with zero_grad(/*set_to_none=*/false) nothing is copied. A gradient that is kept
// beyond the next backward() must be cloned.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/replica.hpp>
#include <lockstep/models/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep {

// What makes a network's output and the targets a loss, the mean over the samples: any callable (y_hat, y) -> scalar
// tensor, or one of torch::nn::functional's losses by its name. As thread-safe as the callable.
class Criterion {
 public:
  template <std::invocable<at::Tensor, at::Tensor> Function>
  Criterion(Function function) : function_(std::move(function)) {}
  template <class Options>
  Criterion(at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&))
      : function_([function](const at::Tensor& y_hat, const at::Tensor& y) { return function(y_hat, y, Options{}); }) {}

  at::Tensor operator()(const at::Tensor& y_hat, const at::Tensor& y) const { return function_(y_hat, y); }

 private:
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> function_;
};

// A handle: copies, also those of what was moved, are the same net. Where its Rank's run() is over, forwards still work
// and backwards throw Error.
template <class Module>
class DataParallel {
 public:
  // Makes the replicas equal: the module moves to rank.device(), parameters and buffers become rank 0's. Create
  // optimizers afterwards. Takes a module by value, a module holder (TORCH_MODULE) or a shared_ptr. Throws Error on
  // every rank if the ranks' modules differ, also in the names of their parameters; a null module; an option below 1.
  DataParallel(std::shared_ptr<Module> module, Rank& rank, const DataParallelOptions& options = {})
      : module_(std::move(module)), replica_(std::make_shared<Replica>(module_, rank, options)) {}
  DataParallel(Module module, Rank& rank, const DataParallelOptions& options = {})  //
      requires std::derived_from<Module, torch::nn::Module>
      : DataParallel(std::make_shared<Module>(std::move(module)), rank, options) {}
  DataParallel(torch::nn::ModuleHolder<Module> holder, Rank& rank, const DataParallelOptions& options = {})
      : DataParallel(holder.is_empty() ? nullptr : holder.ptr(), rank, options) {}
  DataParallel(const DataParallel&) = default;  // a move is a copy too
  DataParallel& operator=(const DataParallel&) = default;

  Module* operator->() const { return module_.get(); }
  Module& operator*() const { return *module_; }

  // The module's forward on this rank's replica; no communication. Throws Error: parameters that were changed by
  // gradients that were never averaged, as after the backward() of a tensor in place of a Loss.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    replica_->check_that_steps_were_averaged();
    return module_->forward(std::forward<Arguments>(arguments)...);
  }

  // The mean loss of this rank's part: criterion(forward(batch.x), batch.y), which must be a mean over the samples. An
  // empty part gives zero without calling forward; but with a SyncBatchNorm in the module it is passed through all
  // layers, whose exchanges with the other ranks need this one.
  Loss loss(const Batch& batch, const Criterion& criterion) {
    const SampleScope scope = samples(batch);
    torch::Tensor local_mean;
    if (batch.size() > 0) {
      local_mean = criterion((*this)(batch.x), batch.y);
    } else if (replica_->forwards_empty_parts()) {
      local_mean = torch::Tensor((*this)(batch.x)).sum();
    }
    return replica_->mean(std::move(local_mean), batch.size(), batch.global_size, batch.mark);
  }

  // The same for a loss computed by hand: the scalar mean over this rank's `local_size` of the global batch's
  // `global_size` samples. With local_size 0, `local_mean` may be undefined; but with a SyncBatchNorm in the module it
  // must come from an empty batch that went through all layers, and be no NaN: a sum.
  Loss mean(torch::Tensor local_mean, int64_t local_size, int64_t global_size) {
    return replica_->mean(std::move(local_mean), local_size, global_size);
  }

  // For forwards that are not loss()'s: while the result lives, this thread's Dropout layers (dropout.hpp) go by the
  // places of `batch`'s samples in the global batch, by steps_done(), and by how many whole batches came before it in
  // the step, under no_sync().
  [[nodiscard]] SampleScope samples(const Batch& batch) const { return SampleScope(replica_->place_of(batch)); }

  // How many backwards outside of no_sync there were, equal on all ranks: the step of a Dropout's masks. Whoever goes
  // on from a checkpoint sets it to what it was there.
  int64_t steps_done() const { return replica_->steps_done(); }
  void set_steps_done(int64_t steps) { replica_->set_steps_done(steps); }

  // For backwards that are not one Loss: compute() calls LibTorch's backward itself, as often as it likes or not at
  // all, and when this returns, all gradients are averages over the ranks, as after Loss::backward(). A parameter's
  // gradient may be averaged as soon as it has been added to once; what is not yet the last of it is to be computed
  // under no_sync(). All ranks must call it; throws as Loss::backward() does.
  void backward_through(const std::function<void()>& compute) { replica_->backward_through(compute); }

  // From what the backward of the mean loss of `local_size` of the global batch's `global_size` samples starts, so that
  // the average over the ranks is the gradient of the global batch's mean loss: local_size * ranks / global_size.
  // Throws Error: sizes that cannot be.
  double weight_of(int64_t local_size, int64_t global_size) const {
    return replica_->weight_of(local_size, global_size);
  }

  // For what works with the replica whatever its module's type is, as Pipeline does.
  const std::shared_ptr<Replica>& replica() const { return replica_; }

  // For a global batch that is computed in parts, as batch.in_parts(k) cuts it: { auto guard = net.no_sync();
  // net.loss(first, …).backward(); } net.loss(last, …).backward(); Gradients of whole batches add up to their sum, as
  // in LibTorch.
  [[nodiscard]] NoSync no_sync() { return replica_->no_sync(); }

 private:
  std::shared_ptr<Module> module_;
  std::shared_ptr<Replica> replica_;
};

template <class Holder>
requires requires {
  typename Holder::ContainedType;
}
DataParallel(Holder, Rank&, const DataParallelOptions& = {})->DataParallel<typename Holder::ContainedType>;

}  // namespace lockstep
