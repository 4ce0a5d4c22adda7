// LocalSgd: ranks take several steps by themselves, and then average their parameters.
//
//   lockstep::DataParallel net(MyNet(), rank, {.average = false});
//   torch::optim::SGD sgd(net->parameters(), /*lr=*/0.1);
//   lockstep::LocalSgd local(net->parameters(), rank, {.sync_every = 16});
//   for (auto& batch : …) {
//     sgd.zero_grad();
//     net.loss(batch, criterion).backward();  // of this rank's part alone
//     sgd.step();
//     local.step();                           // every 16th time: the mean of all ranks' parameters
//   }
//   local.synchronize();                      // before the parameters are evaluated or kept
//
// Stich 2019, "Local SGD Converges Fast and Communicates Little". With an outer learning rate and momentum it is DiLoCo
// (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", algorithm 1): what the
// ranks moved on average is taken for a gradient, with which an outer SGD with Nesterov momentum moves the parameters
// that they started from. Used by its rank's thread only. Cost: an allreduce of the parameters every sync_every steps,
// after the update and not beside it; an outer optimizer keeps the parameters once more, with momentum twice.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

class TrainedParameters;

struct LocalSgdOptions {
  int64_t sync_every = 1;     // steps, H
  double outer_lr = 1;        // 1 without momentum: the mean itself, local SGD. DiLoCo's authors take 0.7 …
  double outer_momentum = 0;  // … and 0.9, of Nesterov's kind, as torch::optim::SGD has it
};

// An optimizer's own state (momentum, Adam's averages) stays each rank's, as in DiLoCo. Buffers are no parameters:
// BatchNorm's running statistics follow each rank's samples until average_running_statistics() makes them one.
//
// Of uneven parts: DataParallel weighs a rank's share of the gradient by its part's size, so that the ranks' mean is
// the gradient of the global batch. A rank's own step is by its share as it is, and the parameters' mean is the plain
// one; thus with sync_every = 1 and SGD the parameters are those of averaged gradients, whatever the split, and a rank
// without samples stays where it is. Over more steps a larger part moves its rank further.
class LocalSgd {
 public:
  // The parameters, equal on all ranks and in the same order, on the rank's device; those that need no gradient are
  // left alone. Throws Error: no parameter that needs one, a sync_every below 1, an outer_lr that is not above 0, an
  // outer_momentum that is not from 0 to below 1.
  LocalSgd(const std::vector<at::Tensor>& parameters, Rank& rank, const LocalSgdOptions& options = {});

  // After each step of the rank's optimizer, on all ranks alike. Every sync_every-th time the parameters become equal
  // on all ranks again; true then. Throws Error: a parameter that
  // needed no gradient at first and does now; and as Rank::allreduce does.
  bool step();

  // Ends the round early, if steps were taken since the last one; false if there were none. All ranks must call it.
  // Throws Error, as step() does, after this LocalSgd was moved to another one.
  bool synchronize();

  // The outer optimizer's momentum, for checkpoints: a tensor per parameter that needs a gradient, in their order,
  // equal on all ranks; none without outer_momentum, and before the first round. Beside it, between two rounds nothing
  // else counts. set_momentum copies; the parameters must be those that the ranks start from. Throws Error: tensors
  // that are not like the parameters.
  std::vector<at::Tensor> momentum() const;
  void set_momentum(const std::vector<at::Tensor>& momentum);

 private:
  struct Group {  // all parameters of one type, as one tensor
    std::vector<at::Tensor> parameters;
    at::Tensor start;     // where the round began; undefined without an outer optimizer
    at::Tensor momentum;  // undefined before the first round
  };

  void check_that_it_holds_parameters() const;
  bool outer() const { return options_.outer_lr != 1 || options_.outer_momentum != 0; }
  at::Tensor moved(Group& group, const at::Tensor& mean) const;  // where the ranks go on from, whose mean this is

  Rank rank_;
  const LocalSgdOptions options_;
  std::shared_ptr<const TrainedParameters> parameters_;
  std::vector<Group> groups_;
  std::vector<std::pair<size_t, size_t>> places_;  // of each parameter: its group, and which one there
  int64_t steps_ = 0;                              // since the last round
};

}  // namespace lockstep
