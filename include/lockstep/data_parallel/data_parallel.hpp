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
#include <lockstep/models/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep {

class CommunicationHook;

struct DataParallelOptions {
  int64_t bucket_bytes = 4 << 20;          // a bucket is full when it holds as many bytes of gradients
  int64_t first_bucket_bytes = 256 << 10;  // of the first bucket, so that averaging starts early
  bool overlap = true;                     // false: every bucket is averaged after backward
  // false: backward() sends nothing. Each rank keeps gradients of its own: for a LocalSgd (local_sgd.hpp), or an
  // averaging of yours. A ShardedOptimizer (sharded_optimizer.hpp) averages in buckets of its own, whatever this says;
  // with false there are no others beside them.
  bool average = true;
  // Averages each bucket in its own way (communication_hook.hpp). Each rank needs one of its own, for this DataParallel
  // alone. Null: one allreduce of the gradients as they are.
  std::shared_ptr<CommunicationHook> hook = nullptr;
};

// One replica's share of the work that does not depend on the module's type.
class Replica;

// The mean loss of this rank's part of a batch. backward() is what averages the gradients, so it is not a plain tensor.
class Loss {
 public:
  Loss(const Loss&) = default;  // a move is a copy too
  Loss& operator=(const Loss&) = default;

  // Computes the gradients of this part, then averages them over all ranks (but see DataParallel::no_sync). Gradients
  // add up over several calls, as in LibTorch. A parameter that no rank has a gradient of stays without one, so that an
  // optimizer leaves it alone, as on one device. All ranks must call it, also those with an empty part. Throws Error: a
  // loss without a graph; a sparse gradient; a parameter that was frozen when the DataParallel was made and is so no
  // longer, or that was registered since; parts that do not make up the global batch, or are of different batches (on
  // all ranks); and as Rank::allreduce does. After an exception this rank is out of step with the others: every later
  // call throws.
  void backward();

  torch::Tensor value() const { return local_mean_.detach(); }  // scalar: this part's mean loss, zero for an empty part
  double item() const { return value().item<double>(); }

 private:
  friend class Replica;
  Loss(std::shared_ptr<Replica> replica, torch::Tensor local_mean, double weight, int64_t local_size,
       int64_t global_size, int32_t mark);

  std::shared_ptr<Replica> replica_;
  torch::Tensor local_mean_;
  double weight_;  // of this part in the average over the ranks
  int64_t local_size_, global_size_;
  int32_t mark_;  // the batch's
};

// While it lives, Loss::backward() only adds to this rank's gradients. The next backward() outside averages them all.
// Inside of DataParallel::backward_through it belongs around every backward but the last.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<Replica> replica);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<Replica> replica_;
  bool before_;
};

// Moves `module` to the rank's device and copies rank 0's parameters and buffers to all ranks. Throws Error on every
// rank if the ranks' modules differ in their number of tensors, a shape or a type.
std::shared_ptr<Replica> make_replica(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                                      const DataParallelOptions& options);
// See DataParallel::mean, loss, weight_of and backward_through.
Loss make_loss(const std::shared_ptr<Replica>& replica, torch::Tensor local_mean, int64_t local_size,
               int64_t global_size, int32_t mark = 0);
bool forwards_empty_parts(const Replica& replica);
void check_that_steps_were_averaged(const Replica& replica);
double weight_of(const Replica& replica, int64_t local_size, int64_t global_size);
// See DataParallel::samples and steps_done.
SamplePlace place_of(Replica& replica, const Batch& batch);
int64_t steps_done(const Replica& replica);
void set_steps_done(Replica& replica, int64_t steps);
// The sizes are of the rank's part and of its batch, which the parts must make up, and Batch::mark is the same for all;
// 0: not known.
void backward_through(Replica& replica, const std::function<void()>& compute, int64_t local_size = 0,
                      int64_t global_size = 0, int32_t mark = 0);
// Lets a caller time backwards, as Balance does. computed() runs when all that this rank itself computes in a backward
// is queued (on the CPU: computed), before it waits for the other ranks' gradients. averaged() runs when these are
// averaged. Neither runs under no_sync. Throws Error: somebody watches already; the replica does not average.
void watch_backwards(Replica& replica, std::function<void()> computed, std::function<void()> averaged);
void stop_watching(Replica& replica) noexcept;

// A handle: copies, also those of what was moved, are the same net. Where its Rank's run() is over, forwards still work
// and backwards throw Error.
template <class Module>
class DataParallel {
 public:
  // Makes the replicas equal: the module moves to rank.device(), parameters and buffers become rank 0's. Create
  // optimizers afterwards. Takes a module by value, a module holder (TORCH_MODULE) or a shared_ptr. Throws Error on
  // every rank if the ranks' modules differ, also in the names of their parameters; a null module; an option below 1.
  DataParallel(std::shared_ptr<Module> module, Rank& rank, const DataParallelOptions& options = {})
      : module_(std::move(module)), replica_(make_replica(module_, rank, options)) {}
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
    check_that_steps_were_averaged(*replica_);
    return module_->forward(std::forward<Arguments>(arguments)...);
  }

  // The mean loss of this rank's part: criterion(forward(batch.x), batch.y), which must be a mean over the samples. An
  // empty part gives zero without calling forward; but with a SyncBatchNorm in the module it is passed through all
  // layers, whose exchanges with the other ranks need this one. Any callable, or one of torch::nn::functional's losses
  // by its name.
  template <std::invocable<torch::Tensor, torch::Tensor> Criterion>
  Loss loss(const Batch& batch, Criterion&& criterion) {
    const SampleScope scope = samples(batch);
    torch::Tensor local_mean;
    if (batch.size() > 0) {
      local_mean = criterion((*this)(batch.x), batch.y);
    } else if (forwards_empty_parts(*replica_)) {
      local_mean = torch::Tensor((*this)(batch.x)).sum();
    }
    return make_loss(replica_, std::move(local_mean), batch.size(), batch.global_size, batch.mark);
  }
  template <class Options>
  Loss loss(const Batch& batch,
            torch::Tensor (*criterion)(const torch::Tensor&, const torch::Tensor&, const Options&)) {
    return loss(batch,
                [&](const torch::Tensor& y_hat, const torch::Tensor& y) { return criterion(y_hat, y, Options{}); });
  }

  // The same for a loss computed by hand: the scalar mean over this rank's `local_size` of the global batch's
  // `global_size` samples. With local_size 0, `local_mean` may be undefined; but with a SyncBatchNorm in the module it
  // must come from an empty batch that went through all layers, and be no NaN: a sum.
  Loss mean(torch::Tensor local_mean, int64_t local_size, int64_t global_size) {
    return make_loss(replica_, std::move(local_mean), local_size, global_size);
  }

  // For forwards that are not loss()'s: while the result lives, this thread's Dropout layers (dropout.hpp) go by the
  // places of `batch`'s samples in the global batch, by steps_done(), and by how many whole batches came before it in
  // the step, under no_sync().
  [[nodiscard]] SampleScope samples(const Batch& batch) const { return SampleScope(place_of(*replica_, batch)); }

  // How many backwards outside of no_sync there were, equal on all ranks: the step of a Dropout's masks. Whoever goes
  // on from a checkpoint sets it to what it was there.
  int64_t steps_done() const { return lockstep::steps_done(*replica_); }
  void set_steps_done(int64_t steps) { lockstep::set_steps_done(*replica_, steps); }

  // For backwards that are not one Loss: compute() calls LibTorch's backward itself, as often as it likes or not at
  // all, and when this returns, all gradients are averages over the ranks, as after Loss::backward(). A parameter's
  // gradient may be averaged as soon as it has been added to once; what is not yet the last of it is to be computed
  // under no_sync(). All ranks must call it; throws as Loss::backward() does.
  void backward_through(const std::function<void()>& compute) { lockstep::backward_through(*replica_, compute); }

  // From what the backward of the mean loss of `local_size` of the global batch's `global_size` samples starts, so that
  // the average over the ranks is the gradient of the global batch's mean loss: local_size * ranks / global_size.
  // Throws Error: sizes that cannot be.
  double weight_of(int64_t local_size, int64_t global_size) const {
    return lockstep::weight_of(*replica_, local_size, global_size);
  }

  // For what works with the replica whatever its module's type is, as Pipeline does.
  const std::shared_ptr<Replica>& replica() const { return replica_; }

  // For a global batch that is computed in parts, as batch.in_parts(k) cuts it: { auto guard = net.no_sync();
  // net.loss(first, …).backward(); } net.loss(last, …).backward(); Gradients of whole batches add up to their sum, as
  // in LibTorch.
  [[nodiscard]] NoSync no_sync() { return NoSync(replica_); }

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
