// Loss: the mean loss of this rank's part of a batch, whose backward() averages the gradients over the ranks. NoSync
// and Whole are guards: for backwards that only add up, and for the use of whole parameters.
//
// Use a Loss or a guard from its rank's thread only. Each keeps its net alive. Once the Rank's run() is over, backwards
// throw Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <utility>

namespace lockstep {

class Replica;

// A Loss is the mean loss of this rank's part of a batch. It is no plain tensor, because backward() also averages.
//
// If the batch has a grain, the Loss holds the losses of this part's grains. Then backward() gives the same bits on any
// number of ranks. It computes the gradient of each grain's summed loss, and adds the grains of all ranks in one order.
class [[nodiscard]] Loss {
 public:
  class Part;  // private: src/data_parallel/loss_part.hpp
  explicit Loss(std::shared_ptr<Part> part) : part_(std::move(part)) {}
  Loss(const Loss&) = default;  // copies are the same loss, and a move is a copy too
  Loss& operator=(const Loss&) = default;

  // Computes the gradients of this part, then averages them over all ranks (but see DataParallel::no_sync). Gradients
  // add up over several calls, as in LibTorch. A parameter for which no rank has a gradient gets none, and an optimizer
  // leaves it alone, as on one device. Call it on all ranks, also those with an empty part. Throws Error: a loss
  // without a graph; cross_entropy's mean over some of a part's targets alone, unless the criterion knows its options;
  // a sparse gradient; a parameter that was registered after the DataParallel was made; ranks that have frozen
  // different ones; parts that do not make up the global batch, or are of different batches (on all ranks); parameters
  // that were changed by gradients never averaged; and as Rank::allreduce does. Without a grain, a single rank looks
  // for new parameters in its first three calls, and for sparse gradients and changed types until a call has left a
  // gradient. After an exception this rank is out of step with the others: every later call throws.
  void backward();

  at::Tensor value() const;  // gives a scalar: this part's mean loss, zero for an empty part
  double item() const { return value().item<double>(); }
  // Gives the mean loss of the whole batch, or for a part by in_parts() that of all ranks' parts. Call it on all ranks.
  // With a grain the mean has the same bits on any number of ranks, so a learning rate may follow it. Throws as
  // Rank::mean does.
  double global_item() const;

  const std::shared_ptr<Part>& part() const { return part_; }  // for lockstep's own code: Part's class is private

  // These say, as compile errors, what to write instead.
  template <class Other>
  friend Loss operator+(const Loss& loss, const Other&) {
    return refuse_arithmetic<Other>(loss);
  }
  template <class Other>
  friend Loss operator-(const Loss& loss, const Other&) {
    return refuse_arithmetic<Other>(loss);
  }
  template <class Other>
  friend Loss operator*(const Loss& loss, const Other&) {
    return refuse_arithmetic<Other>(loss);
  }
  template <class Other>
  friend Loss operator/(const Loss& loss, const Other&) {
    return refuse_arithmetic<Other>(loss);
  }
  template <class Other>
  friend Loss operator*(const Other&, const Loss& loss) requires(!std::same_as<Other, Loss>) {
    return refuse_arithmetic<Other>(loss);
  }

 private:
  template <class Other>
  static Loss refuse_arithmetic(const Loss& loss) {
    static_assert(
        sizeof(Other) == 0,
        "A Loss is no Tensor: add and scale Tensors within one criterion, or call backward() on each Loss, under "
        "no_sync() but for the last. A batch's parts by in_parts(k) add up without a factor.");
    return loss;
  }

  std::shared_ptr<Part> part_;
};

// While it lives, Loss::backward() only adds to this rank's gradients. The next backward() without a NoSync averages
// them all. Inside DataParallel::backward_through, put it around every backward but the last.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<Replica> replica);
  ~NoSync();
  NoSync(NoSync&&) = default;  // a guard that was moved from ends nothing
  NoSync& operator=(NoSync other) noexcept {
    replica_.swap(other.replica_);
    return *this;
  }

 private:
  std::shared_ptr<Replica> replica_;
};

// While one lives, every rank has all parameters of its net whole. Reach the module by `net->` and `*net`, to evaluate,
// to save or to load weights. Changes of the parameters are kept: make the same ones on all ranks. Make a Whole on all
// ranks. Cost: an allgather of the parameters with Sharded::parameters, and nothing otherwise.
class [[nodiscard]] Whole {
 public:
  explicit Whole(std::shared_ptr<Replica> replica);
  ~Whole();
  Whole& operator=(Whole&&) = delete;

 private:
  std::shared_ptr<Replica> replica_;
};

}  // namespace lockstep
