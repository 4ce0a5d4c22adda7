// DataParallel: wraps any torch::nn::Module so that every rank holds an equal replica and gradients are averaged over
// the ranks.
//
// The contract: after net.loss(batch, criterion).backward() every rank has the gradients of the mean loss over the
// whole global batch. It does not matter how the batch was split; parts may be uneven or empty. Additions have a fixed
// order, and all ranks get equal gradients.
//
// Used by its rank's thread only. Cost: every gradient is averaged once per backward(). This happens in buckets, whose
// allreduces run while backward computes earlier layers' gradients. A parameter's .grad is a view into its bucket.
// Clipping and optimizers see ordinary tensors, and with zero_grad(/*set_to_none=*/false) nothing is copied. A
// gradient that you keep beyond zero_grad() moves out of its bucket, which costs a copy.
#pragma once

#include <torch/enum.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data/sample_function.hpp>
#include <lockstep/data_parallel/replica.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace lockstep {

namespace detail {

// A module holder (TORCH_MODULE). Its call operator takes anything until it is compiled, so it must not be asked.
template <class Type>
concept HoldsModule = requires {
  typename Type::ContainedType;
  requires std::derived_from<Type, torch::nn::ModuleHolder<typename Type::ContainedType>>;
};

}  // namespace detail

// Makes a network's output and the targets a loss, the mean over the samples: any callable (y_hat, y) -> scalar
// tensor, or (y_hat, batch) where a mask counts; or one of torch::nn::functional's losses by its name; or one as a
// module, such as torch::nn::MSELoss(). As thread-safe as the callable.
class Criterion {
 public:
  template <class Function>
  requires(!detail::HoldsModule<Function>) && detail::OfSamples<Function>  //
      Criterion(Function function) : function_(std::move(function)) {}
  template <detail::HoldsModule Holder>
  Criterion(Holder holder)
      : Criterion(
            [holder](const at::Tensor& y_hat, const at::Tensor& y) mutable { return holder->forward(y_hat, y); }) {
    if constexpr (requires { holder->options; }) check_options(holder->options);
  }
  template <class Options>
  Criterion(at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&))
      : Criterion([function](const at::Tensor& y_hat, const at::Tensor& y) { return function(y_hat, y, Options{}); }) {}
  // With its options. Throws Error for another reduction than the mean over the samples, and for weights of classes:
  // the average of parts' weighted means is not the whole batch's.
  template <class Options>
  Criterion(at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&),
            const std::type_identity_t<Options>& options)
      : Criterion(
            [function, options](const at::Tensor& y_hat, const at::Tensor& y) { return function(y_hat, y, options); }) {
    check_options(options);
  }

  at::Tensor operator()(const at::Tensor& y_hat, const at::Tensor& y) const { return function_(y_hat, y); }
  at::Tensor operator()(const at::Tensor& y_hat, const Batch& batch) const { return function_(y_hat, batch); }

 private:
  // A loss with weights that may ignore a class divides by the weights' sum.
  template <class Options>
  static void check_options(const Options& options) {
    if constexpr (requires { options.reduction(); })
      check_reduction(torch::enumtype::get_enum_name(options.reduction()));
    if constexpr (requires { options.weight().defined(), options.ignore_index(); }) check_weights(options.weight());
  }
  static void check_reduction(const std::string& name);
  static void check_weights(const at::Tensor& weights_of_classes);

  detail::SampleFunction function_;
};

// A handle: copies are the same net, and a move is a copy too. Once its Rank's run() is over, forwards still work and
// backwards throw Error.
template <class Module>
class DataParallel {
 public:
  // Makes the replicas equal: the module moves to rank.device(), and its parameters and buffers become rank 0's. Create
  // optimizers afterwards. Takes a module by value, a module holder (TORCH_MODULE) or a shared_ptr. Throws Error on
  // every rank if the ranks' modules differ (also in their parameters' names), for a null module, and for an option
  // below 1.
  DataParallel(std::shared_ptr<Module> module, Rank& rank, const DataParallelOptions& options = {})
      : module_(std::move(module)), replica_(std::make_shared<Replica>(module_, rank, options)) {}
  DataParallel(Module module, Rank& rank, const DataParallelOptions& options = {})  //
      requires std::derived_from<Module, torch::nn::Module>
      : DataParallel(std::make_shared<Module>(std::move(module)), rank, options) {}
  DataParallel(torch::nn::ModuleHolder<Module> holder, Rank& rank, const DataParallelOptions& options = {})
      : DataParallel(holder.is_empty() ? nullptr : holder.ptr(), rank, options) {}
  DataParallel(const DataParallel&) = default;  // a move is a copy too
  DataParallel& operator=(const DataParallel&) = default;

  // The module. In a net that is sharded (DataParallelOptions::sharded) they throw Error but within loss() and while a
  // whole() lives: LibTorch's optimizers and clip_grad_norm_ would find no gradients there.
  Module* operator->() const { return &**this; }
  Module& operator*() const {
    replica_->check_module_is_open();
    return *module_;
  }

  void train(bool on = true) { module_->train(on); }  // as of a torch::nn::Module, on every layer
  void eval() { module_->eval(); }

  // See Whole. Before save_weights() and evaluate().
  Whole whole() const { return Whole(replica_); }

  // Calls the module's forward on this rank's replica, without communication. Throws Error if gradients that were never
  // averaged have changed the parameters, as after the backward() of a tensor instead of a Loss.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    replica_->check_that_steps_were_averaged();
    try {
      return module_->forward(std::forward<Arguments>(arguments)...);
    } catch (...) {
      replica_->rethrow_failure();
      throw;
    }
  }

  // The mean loss of this rank's part: criterion(forward(batch.x), batch.y), which must be a mean over the samples. A
  // module whose forward takes a Batch gets the batch in the place of x, and such a criterion in the place of y. An
  // empty part gives zero without calling forward; but with a SyncBatchNorm in the module, or with
  // Sharded::parameters, it is passed through all layers, whose exchanges with the other ranks need this one.
  Loss loss(const Batch& batch, const Criterion& criterion) {
    if (batch.grain > 0) {  // check_arithmetic calls it until backward() is done, when this handle may be gone
      return loss(batch, [module = module_, replica = replica_.get(), criterion](const Batch& grain) {
        replica->check_that_steps_were_averaged();
        return criterion(module->forward(detail::input_of<Module>(grain)), grain);
      });
    }
    const SampleScope scope = samples(batch);
    torch::Tensor local_mean;
    if (batch.size() > 0) {
      local_mean = criterion((*this)(detail::input_of<Module>(batch)), batch);
    } else if (replica_->forwards_empty_parts()) {
      local_mean = torch::Tensor((*this)(detail::input_of<Module>(batch))).sum();
    }
    return replica_->mean(std::move(local_mean), batch.size(), batch.global_size, batch.mark);
  }

  // The same as loss(batch, Criterion(function, options)):
  //   net.loss(batch, F::cross_entropy, F::CrossEntropyFuncOptions().label_smoothing(0.1))
  template <class Options>
  Loss loss(const Batch& batch, at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&),
            const std::type_identity_t<Options>& options) {
    return loss(batch, Criterion(function, options));
  }

  // The same for a loss that you compute yourself. mean_of(part) gives the mean loss of a part's samples. It is called
  // once for this rank's part, unless that is empty; with a grain once for each grain of it, ascending. If the module
  // has a SyncBatchNorm, or with Sharded::parameters, it is called for an empty part too, and must then give a sum. By
  // grains, call backward() before the next loss(): BatchNorm's running statistics follow the last one. With a grain
  // and Sharded::parameters it is called as often on all ranks, for stand-ins too (Replica::loss_by_grains()), and
  // never for an empty part. The module's buffers do not change by stand-ins. Hooks on parameters do see them, and so
  // does what mean_of() counts itself; there SampleScope::current()->place().again tells.
  template <class MeanOf>
  requires(!detail::HoldsModule<MeanOf>) && std::invocable<MeanOf, const Batch&>  //
      Loss loss(const Batch& batch, const MeanOf& mean_of) {
    if (batch.grain > 0) return replica_->loss_by_grains(batch, mean_of);
    const SampleScope scope = samples(batch);
    const bool calls = batch.size() > 0 || replica_->forwards_empty_parts();
    return replica_->mean(calls ? torch::Tensor(mean_of(batch)) : torch::Tensor(), batch.size(), batch.global_size,
                          batch.mark);
  }

  // The same for a loss that you compute yourself. `local_mean` is the scalar mean over this rank's `local_size`
  // samples, of the global batch's `global_size`. If local_size is 0, local_mean may be undefined. But if the module
  // has a SyncBatchNorm, or with Sharded::parameters, it must come from an empty batch that went through all layers,
  // and must not be NaN: take a sum.
  Loss mean(torch::Tensor local_mean, int64_t local_size, int64_t global_size) {
    return replica_->mean(std::move(local_mean), local_size, global_size);
  }

  // Open this around a forward of your own; loss() does it by itself. While the result lives, this thread's Dropout
  // layers (dropout.hpp) draw by the places of `batch`'s samples in the global batch, and by steps_done(). They also
  // draw by the number of whole batches before it in the step, under no_sync().
  [[nodiscard]] SampleScope samples(const Batch& batch) const { return SampleScope(replica_->place_of(batch)); }

  // The number of backwards so far outside of no_sync. It is equal on all ranks, and gives the step of a Dropout's
  // masks. If you resume from a checkpoint, set it to the value that it had there.
  int64_t steps_done() const { return replica_->steps_done(); }
  void set_steps_done(int64_t steps) { replica_->set_steps_done(steps); }

  // For a backward that is not that of one Loss. compute() calls LibTorch's backward itself, any number of times. When
  // this returns, all gradients are averages over the ranks, as after Loss::backward(). A parameter's gradient may be
  // averaged as soon as something was added to it. So compute every contribution but the last under no_sync(). All
  // ranks must call it. Throws as Loss::backward() does.
  void backward_through(const std::function<void()>& compute) { replica_->backward_through(compute); }

  // The factor for a part's mean loss with which the average over the ranks is the gradient of the global batch's mean
  // loss: local_size * ranks / global_size. Multiply a loss of float32 or wider: 16 bits would round the factor. Throws
  // Error for impossible sizes.
  double weight_of(int64_t local_size, int64_t global_size) const {
    return replica_->weight_of(local_size, global_size);
  }

  std::shared_ptr<TrainedNet> trained() const { return trained_net(replica_); }  // for an Optimizer

  // The replica without its module's type, for code such as Pipeline.
  const std::shared_ptr<Replica>& replica() const { return replica_; }

  // While the result lives, backward() only adds up gradients. Use it for a global batch that is computed in parts, as
  // batch.in_parts(k) cuts it:
  //   { auto guard = net.no_sync(); net.loss(first, …).backward(); }
  //   net.loss(last, …).backward();
  // Gradients of several whole batches add up to their sum, as in LibTorch.
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
