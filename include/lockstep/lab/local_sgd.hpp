// LocalSgd: ranks take several steps alone, and then average their parameters.
//
//   lockstep::DataParallel net(MyNet(), rank, {.average = false});
//   torch::optim::SGD sgd(net->parameters(), /*lr=*/0.1);
//   lockstep::LocalSgd local(net->parameters(), rank, {.sync_every = 16});
//   for (auto& batch : …) {
//     sgd.zero_grad();
//     net.loss(batch, criterion).backward();  // gradients of this rank's part alone
//     sgd.step();
//     local.step();                           // every 16th time: the mean of all ranks' parameters
//   }
//   local.synchronize();                      // before the parameters are evaluated or kept
//
// Stich 2019, "Local SGD Converges Fast and Communicates Little". With an outer learning rate and momentum it is DiLoCo
// (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1). DiLoCo
// takes the ranks' average movement for a gradient. With it an outer SGD with Nesterov momentum moves the parameters
// from which the ranks started. Use a LocalSgd from its rank's thread only. Cost: an allreduce of the parameters every
// sync_every steps, after the update and not beside it. An outer optimizer keeps the parameters once more, and with
// momentum twice. In each round it also checks whether ranks have loaded other weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

class RoundStart;
class TrainedParameters;

struct LocalSgdOptions {
  int64_t sync_every = 1;     // steps between two averages, H
  double outer_lr = 1;        // 1 and no momentum: the plain mean, local SGD. DiLoCo's authors take 0.7
  double outer_momentum = 0;  // Nesterov momentum, as torch::optim::SGD has it. DiLoCo's authors take 0.9
};

// Each rank keeps its own optimizer's state (momentum, Adam's averages), as in DiLoCo. Buffers are not averaged:
// BatchNorm's running statistics follow each rank's samples until average_running_statistics() makes them equal.
//
// Uneven parts: DataParallel weighs a rank's gradient by its part's size, so that the ranks' mean is the gradient of
// the global batch. A rank steps with this weighted gradient, and the mean of the parameters is the plain mean. So with
// sync_every = 1 and SGD the parameters are those of averaged gradients, whatever the split. A rank without samples
// stays where it is. Over more steps a larger part moves its rank further.
//
// Loaded weights: an outer optimizer moves the parameters from their values at the first backward of a round. So load
// weights into the module before that, on all ranks alike.
class LocalSgd {
 public:
  // Give parameters that are equal on all ranks, in the same order, and on the rank's device. Frozen ones are left
  // alone. Make it on all ranks: with an outer optimizer the ranks compare their parameters. Throws Error if these
  // differ, if no parameter needs a gradient, if sync_every < 1, if outer_lr is not above 0, or if outer_momentum is
  // not in [0, 1).
  LocalSgd(const std::vector<at::Tensor>& parameters, Rank& rank, const LocalSgdOptions& options = {});
  LocalSgd& operator=(LocalSgd&&) = delete;

  // Call it after each step of the rank's optimizer, on all ranks alike. Every sync_every-th call makes the parameters
  // equal on all ranks again, and returns true. Throws Error: a parameter that needed no gradient at first and needs
  // one now; with an outer optimizer, if the ranks began the round with parameters that differ; and as Rank::allreduce
  // does.
  bool step();

  // Ends the round early. If no step was taken since the last round, does nothing and returns false. Call it on all
  // ranks.
  bool synchronize();

  // Gives the outer optimizer's momentum, for checkpoints: one tensor for each parameter that needs a gradient, in
  // order, equal on all ranks. It is empty without outer_momentum, and before the first round. Between two rounds a
  // LocalSgd has no other state. set_momentum copies; call it when the parameters are those from which the ranks start.
  // Throws Error for tensors that are not like the parameters.
  std::vector<at::Tensor> momentum() const;
  void set_momentum(const std::vector<at::Tensor>& momentum);

 private:
  struct Group {  // all parameters of one type, as one tensor
    std::vector<at::Tensor> parameters;
    at::Tensor momentum;  // undefined before the first round
  };

  bool outer() const { return options_.outer_lr != 1 || options_.outer_momentum != 0; }
  at::Tensor moved(size_t group, const at::Tensor& mean);  // gives the values to go on from, by their mean

  Rank rank_;
  const LocalSgdOptions options_;
  std::shared_ptr<const TrainedParameters> parameters_;
  std::vector<Group> groups_;
  std::shared_ptr<RoundStart> start_;              // null without an outer optimizer
  std::vector<std::pair<size_t, size_t>> places_;  // each parameter's group, and its place in the group
  int64_t steps_ = 0;                              // steps since the last round
};

}  // namespace lockstep
