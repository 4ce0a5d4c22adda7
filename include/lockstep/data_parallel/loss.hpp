// Loss: the mean loss of this rank's part of a batch, whose backward() averages the gradients over the ranks. NoSync
// and Whole are guards around what a step does otherwise.
//
// Used by its rank's thread only. They keep their net alive. Where its Rank's run() is over, backwards throw Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

namespace lockstep {

class Replica;

// The mean loss of this rank's part of a batch. It is not a plain tensor, because its backward() also averages
// gradients.
//
// If the batch has a grain, it is the losses of this part's grains. Then backward() gives the same bits on any number
// of ranks: it computes the gradient of each grain's summed loss, and adds the grains of all ranks in one order.
class [[nodiscard]] Loss {
 public:
  class Part;  // private: src/data_parallel/loss_part.hpp
  explicit Loss(std::shared_ptr<Part> part) : part_(std::move(part)) {}
  Loss(const Loss&) = default;  // copies are the same loss, and a move is a copy too
  Loss& operator=(const Loss&) = default;

  // Computes the gradients of this part, then averages them over all ranks (but see DataParallel::no_sync). Gradients
  // add up over several calls, as in LibTorch. A parameter that no rank has a gradient of stays without one, so that an
  // optimizer leaves it alone, as on one device. Call it on all ranks, also those with an empty part. Throws Error: a
  // loss without a graph; cross_entropy's mean over some of a part's targets alone (ignore_index); a sparse gradient; a
  // parameter that was frozen when the DataParallel was made and is so no longer, or that was registered since; parts
  // that do not make up the global batch, or are of different batches (on all ranks); parameters that gradients which
  // were never averaged have changed; and as Rank::allreduce does. After an exception this rank is out of step with the
  // others: every later call throws.
  void backward();

  at::Tensor value() const;  // scalar: this part's mean loss, zero for an empty part
  double item() const { return value().item<double>(); }
  // The mean loss of the whole batch; of a part by in_parts(), of all ranks' parts. Call it on all ranks. With a
  // grain it has the same bits on any number of ranks, so a learning rate may follow it. Throws as Rank::mean does.
  double global_item() const;

 private:
  std::shared_ptr<Part> part_;
};

// While it lives, Loss::backward() only adds to this rank's gradients. The next backward() without it averages them
// all. Inside DataParallel::backward_through, put it around every backward but the last.
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

// While one lives, every rank has all parameters of its net whole, and the module may be reached by `net->` and `*net`:
// to evaluate, to save or to load weights. What is changed in the parameters is kept, if it is the same on all ranks.
// Make it on all ranks. Cost: an allgather of the parameters with Sharded::parameters, and nothing otherwise.
class [[nodiscard]] Whole {
 public:
  explicit Whole(std::shared_ptr<Replica> replica);
  ~Whole();
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;

 private:
  std::shared_ptr<Replica> replica_;
};

}  // namespace lockstep
