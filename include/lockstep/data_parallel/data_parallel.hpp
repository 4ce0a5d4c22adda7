// DataParallel: wraps any torch::nn::Module so that every rank holds an equal replica and gradients are averaged over
// the ranks.
//
// The contract: after net.loss(batch, criterion).backward() every rank has the gradients of the mean loss over the
// whole global batch. It does not matter how the batch was split; parts may be uneven or empty. Additions have a fixed
// order, and all ranks get equal gradients.
//
// You may freeze and unfreeze parameters between steps by requires_grad_(), alike on all ranks. A sharded net trains
// those alone that needed a gradient when it was made, so freeze others afterwards.
//
// Use a DataParallel from its rank's thread only. Cost: every gradient is averaged once per backward(). This happens in
// buckets, whose allreduces run while backward computes earlier layers' gradients. A parameter's .grad is a view into
// its bucket, on a single rank only after the first grain. Clipping and optimizers see ordinary tensors, and with
// zero_grad(/*set_to_none=*/false) nothing is copied. If you keep a gradient beyond zero_grad(), it moves out of the
// bucket, at the cost of a copy.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/data_parallel/loss.hpp>
#include <lockstep/data_parallel/options.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace lockstep {

class TrainedNet;

namespace detail {

template <class Output>
at::Tensor only_output(Output output) {
  static_assert(std::convertible_to<Output, at::Tensor>,
                "With a criterion, forward gives one Tensor. Where it gives more, give loss() a function of the batch: "
                "net.loss(batch, [&](const lockstep::Batch& part) { auto [a, b] = net(part.x); ... })");
  return output;
}

}  // namespace detail

// A Replicas is a net of which every rank has an equal replica, whatever its module's type. A DataParallel is a typed
// handle on one. Copies are the same net, and a move is a copy too. Once its Rank's run() is over, forwards still work
// and backwards throw Error.
class Replicas {
 public:
  Replicas(const Replicas&) = default;
  Replicas& operator=(const Replicas&) = default;

  // Call it before save_weights(), evaluate() and check_replicas(). See Whole.
  Whole whole() const { return Whole(replica_); }

  // Makes a Loss of a mean that you compute yourself. `local_mean` is the scalar mean over this rank's `local_size`
  // samples, of the global batch's `global_size`; or over tokens, or the weights of classes, of which all ranks
  // together have global_size. If local_size is 0, local_mean may be undefined. But if the module has a SyncBatchNorm,
  // or with Sharded::parameters, pass an empty batch through all layers, and take a sum, since a mean would be NaN.
  Loss mean(at::Tensor local_mean, double local_size, double global_size);

  // Open this around a forward of your own; loss() opens one by itself. While the result lives, this thread's Dropout
  // layers (dropout.hpp) draw by the places of `batch`'s samples in the global batch, and by steps_done(). Under
  // no_sync() the number of earlier whole batches in the step counts too.
  [[nodiscard]] SampleScope samples(const Batch& batch) const;

  // Gives the number of backwards so far outside of no_sync. It is equal on all ranks, and is the step of a Dropout's
  // masks. If you resume from a checkpoint, set the number of the checkpoint.
  int64_t steps_done() const;
  void set_steps_done(int64_t steps);

  // Averages backwards that are not of one Loss. compute() calls LibTorch's backward itself, any number of times. When
  // this returns, all gradients are averages over the ranks, as after Loss::backward(). A parameter's gradient may be
  // averaged as soon as something was added to it. So compute every contribution but the last under no_sync(). Call it
  // on all ranks. Throws as Loss::backward() does. The backward counts for the batch that this thread took last from
  // batches().
  void backward_through(const std::function<void()>& compute);

  // Gives the factor for a part's mean loss with which the average over the ranks is the gradient of the global batch's
  // mean loss: local_size * ranks / global_size. Multiply a loss of float32 or wider: 16 bits would round the factor.
  // Throws Error for impossible sizes.
  double weight_of(int64_t local_size, int64_t global_size) const;

  // While the result lives, backward() only adds up gradients. Use it for a global batch that is computed in parts, as
  // batch.in_parts(k) cuts it:
  //   { auto guard = net.no_sync(); net.loss(first, …).backward(); }
  //   net.loss(last, …).backward();
  // Gradients of several whole batches add up to their sum, as in LibTorch.
  [[nodiscard]] NoSync no_sync() { return NoSync(replica_); }

  std::shared_ptr<TrainedNet> trained() const;  // an Optimizer needs it
  // These two are for lockstep's own code: Replica's class is private.
  explicit Replicas(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {}
  const std::shared_ptr<Replica>& replica() const { return replica_; }

 protected:
  using MeanOf = std::function<at::Tensor(const Batch&)>;
  Replicas(std::shared_ptr<torch::nn::Module> module, const Rank& rank, const DataParallelOptions& options);
  Loss loss_of(const Batch& batch, const MeanOf& mean_of);
  Loss loss_of(const Batch& batch, const Criterion& criterion, const MeanOf& mean_of);  // counts for a MeanOver first
  // Gives the criterion's loss. In the first losses it tells whether this is a mean over samples.
  static at::Tensor loss_of_outputs(Replica& replica, const Criterion& criterion, const at::Tensor& y_hat,
                                    const Batch& batch);
  static void check_module_is_open(const Replica& replica);  // throws Error if nobody may reach the module
  static void before_forward(Replica& replica);
  static void rethrow_failure(const Replica& replica);  // call it while an exception of forward() is handled

 private:
  std::shared_ptr<Replica> replica_;
};

template <class Module>
class DataParallel : public Replicas {
 public:
  // Makes the replicas equal: the module moves to rank.device(), and its parameters and buffers become rank 0's. Create
  // optimizers afterwards. Takes a module by value, a module holder (TORCH_MODULE), a shared_ptr or a unique_ptr.
  // Throws Error on every rank if the ranks' modules differ in their number of tensors, a name, a shape or a type; for
  // a null module; and for an option below 1.
  DataParallel(std::shared_ptr<Module> module, const Rank& rank, const DataParallelOptions& options = {})
      : Replicas(module, rank, options), module_(std::move(module)) {}
  DataParallel(Module module, const Rank& rank, const DataParallelOptions& options = {})  //
      requires std::derived_from<Module, torch::nn::Module>
      : DataParallel(std::make_shared<Module>(std::move(module)), rank, options) {}
  DataParallel(torch::nn::ModuleHolder<Module> holder, const Rank& rank, const DataParallelOptions& options = {})
      : DataParallel(holder.is_empty() ? nullptr : holder.ptr(), rank, options) {}
  DataParallel(const DataParallel&) = default;  // a move is a copy too
  DataParallel& operator=(const DataParallel&) = default;

  // These give the module. In a sharded net (DataParallelOptions::sharded) they throw Error except within loss() and
  // while a whole() lives: LibTorch's optimizers and clip_grad_norm_ would find no gradients there.
  Module* operator->() const { return &**this; }
  Module& operator*() const { return *module(); }
  // Gives the module itself, to keep or for torch::save().
  const std::shared_ptr<Module>& module() const {
    check_module_is_open(*replica());
    return module_;
  }

  void train(bool on = true) { module_->train(on); }  // sets the mode of every layer, as torch::nn::Module does
  void eval() { module_->eval(); }

  // Calls the module's forward on this rank's replica, without communication.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward_of(*module_, *replica(), std::forward<Arguments>(arguments)...);
  }

  // Gives the mean loss of this rank's part: criterion(forward(batch.x), batch.y). Make the criterion a mean over the
  // samples, or a MeanOver. A module whose forward takes a Batch gets the batch in place of x, and a criterion
  // (y_hat, batch) gets it in place of y. An empty part gives zero without calling forward. But with a SyncBatchNorm in
  // the module, or with Sharded::parameters, it passes through all layers, whose exchanges need all ranks.
  Loss loss(const Batch& batch, const Criterion& criterion) {
    // Without a grain the criterion is called before this returns, so a reference is enough.
    const auto now = [this, &criterion](const Batch& part) { return mean_of(*module_, *replica(), criterion, part); };
    if (batch.grain == 0) return loss_of(batch, criterion, now);
    // A grain_check calls this until backward() is done, when this handle may be gone. The Loss keeps the replica.
    return loss_of(batch, criterion, [module = module_, replica = replica().get(), criterion](const Batch& part) {
      return mean_of(*module, *replica, criterion, part);
    });
  }

  // Does the same as loss(batch, Criterion(function, options)):
  //   net.loss(batch, F::cross_entropy, F::CrossEntropyFuncOptions().label_smoothing(0.1))
  template <class Options>
  Loss loss(const Batch& batch, at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&),
            const std::type_identity_t<Options>& options) {
    return loss(batch, Criterion(function, options));
  }

  // Does the same for a loss that you compute yourself. mean_of(part) gives the mean loss of a
  // part's samples. It is called once for this rank's part, unless that is empty; with a grain once for each grain of
  // it, ascending. If the module has a SyncBatchNorm, or with Sharded::parameters, it is called for an empty part too:
  // give a sum then. By grains, call backward() before the next loss(): BatchNorm's running statistics follow the last
  // one. With a grain and Sharded::parameters all ranks call it equally often, and never for an empty part. A rank with
  // fewer grains than another one computes stand-ins after its grains, of two samples, or of one if a grain has one.
  // Their results are dropped, and the module's buffers do not change. But hooks on parameters see stand-ins, and so do
  // counters in mean_of(): ask SampleScope::current()->place().again there.
  //
  // Throws Error, with a grain: a batch whose samples are not this rank's grains; more than one intra-op thread; layers
  // whose results depend on the ranks (SyncBatchNorm, LibTorch's dropout); a communication hook, or average = false.
  // With Sharded::parameters also a batch without samples; stand-ins without Batch::like, or with one that is not like
  // x, y and `more`; a part by in_parts() of a batch without Batch::runs.
  template <class MeanOf>
  requires(!detail::HoldsModule<MeanOf>) && std::invocable<MeanOf, const Batch&>  //
      Loss loss(const Batch& batch, const MeanOf& mean_of) {
    return loss_of(batch, mean_of);
  }

  // Says, as a compile error of torch::save(net, file), what to write instead.
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const DataParallel&) {
    static_assert(sizeof(Module) == 0, "Save the module, on one rank: torch::save(net.module(), file).");
    return archive;
  }

 private:
  static at::Tensor mean_of(Module& module, Replica& replica, const Criterion& criterion, const Batch& part) {
    at::Tensor y_hat = detail::only_output(forward_of(module, replica, detail::input_of<Module>(part)));
    return part.size() > 0 ? loss_of_outputs(replica, criterion, y_hat, part) : y_hat.sum();
  }

  template <class... Arguments>
  static auto forward_of(Module& module, Replica& replica, Arguments&&... arguments) {
    static_assert(
        requires { module.forward(std::forward<Arguments>(arguments)...); },
        "The module's forward does not take these arguments. For loss() it takes (const torch::Tensor& x); for "
        "several inputs let it take (const lockstep::Batch& batch), with batch.x and batch[\"name\"].");
    before_forward(replica);
    try {
      return module.forward(std::forward<Arguments>(arguments)...);
    } catch (...) {
      rethrow_failure(replica);
      throw;
    }
  }

  std::shared_ptr<Module> module_;
};

template <class Holder>
requires requires {
  typename Holder::ContainedType;
}
DataParallel(Holder, const Rank&, const DataParallelOptions& = {})->DataParallel<typename Holder::ContainedType>;
template <class Module>
DataParallel(std::unique_ptr<Module>, const Rank&, const DataParallelOptions& = {}) -> DataParallel<Module>;

}  // namespace lockstep
