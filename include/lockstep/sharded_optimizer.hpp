// ShardedOptimizer: an optimizer of which each rank keeps and computes one slice (ZeRO, stage 1).
//
//   lockstep::DataParallel net(MyNet(), rank, {.average = false});
//   lockstep::ShardedOptimizer adam(net->parameters(), rank,
//                                   [](auto slices) { return std::make_unique<torch::optim::Adam>(slices, 1e-3); });
//   for (auto& batch : …) {
//     adam.zero_grad();
//     net.loss(batch, criterion).backward();  // each rank's share
//     adam.step();                            // averages them, and moves all parameters
//   }
//
// Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5. The
// parameters stay equal on all ranks, and are those of the optimizer on every rank's whole parameters. Used by its
// rank's thread only. Cost per step: a reduce-scatter of the gradients and an allgather of the parameters, together the
// bytes of the allreduce that they replace, not overlapped with backward; 1 / ranks of the optimizer's state and work.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <lockstep/rank.hpp>

#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

class ShardedOptimizer {
 public:
  // Makes the optimizer of this rank's slices: flat tensors, one for each type of the parameters. It must compute value
  // by value, as SGD, Adam, AdamW, Adagrad and RMSprop do; one that looks at a whole tensor's norm or shape would see
  // the slice's. One group of options counts for all parameters.
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> slices)>;

  // The parameters, equal on all ranks and in the same order, move into flat memory, and so do their gradients; those
  // that need no gradient are left alone. With DataParallel's option average = false; gradients that are averages
  // already are right too, and averaged for nothing. Throws Error: no parameter that needs a gradient, one that is not
  // on the rank's device, a factory that makes nothing.
  ShardedOptimizer(const std::vector<at::Tensor>& parameters, Rank& rank, const Factory& make);

  // Gradients become zero, where they lie.
  void zero_grad();

  // Averages the gradients over the ranks, each rank its slice, updates it, and gathers the parameters. A parameter
  // without a gradient counts as one with zeros. All ranks must call it. The .grad that it leaves are the rank's
  // shares. Throws Error: a sparse gradient; and as Rank's collectives do.
  void step();

  // The optimizer of this rank's slices: for changing its learning rate; its state is this rank's part of the state.
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  // All parameters of one type. What the ranks' slices share out equally may end in zeros that are no parameter's.
  struct Flat {
    std::vector<at::Tensor> parameters;  // views into values
    std::vector<at::Tensor> views;       // their gradients' places
    at::Tensor values;
    at::Tensor gradients;
    at::Tensor slice;  // this rank's, of values
  };

  Flat flatten(const std::vector<at::Tensor>& parameters) const;
  void collect_gradients(Flat& flat) const;

  Rank& rank_;
  std::vector<Flat> flats_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace lockstep
