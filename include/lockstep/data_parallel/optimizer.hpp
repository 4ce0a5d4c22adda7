// Optimizer: the one way to change a net's parameters, wherever they lie: whole, in slices (ZeRO), in parts of a
// network.
//
//   lockstep::DataParallel net(MyNet(), rank, {.sharded = lockstep::Sharded::gradients});
//   lockstep::Optimizer adam(net, torch::optim::AdamOptions(1e-3));
//   for (auto& batch : …) {
//     adam.zero_grad();
//     net.loss(batch, criterion).backward();
//     adam.step({.clip = 1});
//   }
//
// The parameters become what an optimizer of LibTorch would make of them on one device, on a GPU but for rounding. If
// no rank had a gradient of a parameter, momentum and weight decay leave it alone too. Use an Optimizer from its rank's
// thread only. Cost: the optimizer's own. In a sharded net each rank has 1 / ranks of its state and work, and step()
// ends in an allgather of the parameters (not with Sharded::parameters).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <lockstep/nn/weights.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {

class ShardedNet;
class TrainedNet;

struct StepOptions {
  // Scales gradients down so that their norm over all parameters of the network is at most this (Pascanu et al. 2013).
  // Infinity: the norm is only computed. 0: it is not. Where ranks have parts of a network, only this clips:
  // torch::nn::utils::clip_grad_norm_ over layers of a SplitModel finds no gradients, and returns 0 without a warning.
  double clip = 0;
  // Skips a step, on all ranks, whose averaged gradients have a NaN or an infinity, and drops the gradients. On a GPU
  // the host waits for them.
  bool skip_not_finite = false;
};

struct Step {
  bool taken = true;
  // The gradients' norm before the clipping: float64, on the rank's device, of the same bits on all ranks and in each
  // layout with equal gradients. Undefined without StepOptions::clip, and if the step was not taken.
  at::Tensor norm = {};
};

class Optimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  // Makes an optimizer of LibTorch, or one like it, of groups of tensors: parameters, or this rank's flat slices of
  // them. A rank may have an empty group. Where the net is sharded, the optimizer must compute value by value, as
  // LibTorch's do: a whole tensor's norm or shape would be that of a slice.
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups groups)>;
  // Divides a module's parameters into groups that have options of their own, such as lockstep::decay_groups.
  using Grouping = std::function<Groups(const torch::nn::Module& module)>;

  // Steps all parameters of `net`, a DataParallel or a SplitModel: in one group, or in those of `grouping`. Make it
  // alike on all ranks. Throws Error if `make` gives nothing or an optimizer of other tensors, and if a parameter that
  // needs a gradient is in no group or in two.
  template <class Net>
  Optimizer(Net& net, const Make& make, const Grouping& grouping = {}) : Optimizer(net.trained(), make, grouping) {}

  // Makes LibTorch's optimizer of these options: an SGD, Adam, AdamW, Adagrad or RMSprop. On a GPU the first three step
  // by one of LibTorch's fused kernels instead of up to 14 kernels for each parameter.
  template <class Net>
  Optimizer(Net& net, const torch::optim::SGDOptions& options, const Grouping& grouping = {})
      : Optimizer(net, fused_maker(options), grouping) {}
  template <class Net>
  Optimizer(Net& net, const torch::optim::AdamOptions& options, const Grouping& grouping = {})
      : Optimizer(net, fused_maker(options), grouping) {}
  template <class Net>
  Optimizer(Net& net, const torch::optim::AdamWOptions& options, const Grouping& grouping = {})
      : Optimizer(net, fused_maker(options), grouping) {}
  template <class Net>
  Optimizer(Net& net, const torch::optim::AdagradOptions& options, const Grouping& grouping = {})
      : Optimizer(net, maker<torch::optim::Adagrad>(options), grouping) {}
  template <class Net>
  Optimizer(Net& net, const torch::optim::RMSpropOptions& options, const Grouping& grouping = {})
      : Optimizer(net, maker<torch::optim::RMSprop>(options), grouping) {}

  ~Optimizer();
  Optimizer& operator=(Optimizer&&) = delete;

  // Clears the gradients of all backward() calls since the last time; in a sharded net step() clears them too. In a net
  // that is split by layers or channels the layers' own zero_grad() does not. There a backward() after step() without
  // zero_grad() throws Error.
  void zero_grad() { zero_grad(/*in_place=*/false); }

  // Updates the parameters. Call it on all ranks. Throws Error: a clip below 0; a sharded net without averaged
  // gradients, as after backward() under no_sync() alone; there also a parameter that was frozen when the net was made,
  // and is not now; ranks whose optimizers have different options (compared in steps 1, 2, 4, 8, …); and as Rank's
  // collectives do.
  Step step(const StepOptions& options = {});

  // Gives LibTorch's optimizer of the parameters, or of this rank's slices. Look at the state, but do not step it.
  const torch::optim::Optimizer& inner() const { return *inner_; }

  // Gives the groups, for their options. Set the same options on all ranks.
  std::vector<torch::optim::OptimizerParamGroup>& param_groups();
  void set_lr(double lr);  // sets all groups' learning rate, from the next step on

  // Makes a scheduler of LibTorch, or one like it, that sets these learning rates from a `torch::optim::Optimizer&`:
  //   auto rate = adam.scheduler<torch::optim::StepLR>(/*step_size=*/30, /*gamma=*/0.1);
  // Use it no longer than the Optimizer. docs/guide/optimizer.md says how it goes on after a resume.
  template <class Scheduler, class... Arguments>
  Scheduler scheduler(Arguments&&... arguments) {
    return Scheduler(*inner_, std::forward<Arguments>(arguments)...);
  }
  template <class Never = void>
  operator torch::optim::Optimizer&() {
    static_assert(!std::is_void_v<Never>,
                  "An Optimizer makes LibTorch's schedulers: optimizer.scheduler<torch::optim::StepLR>(30, 0.1). "
                  "Where a torch::optim::Optimizer would step, call optimizer.step().");
    return *inner_;
  }

  // Sets the weight decay of one group of an optimizer, from the next step on. Do not set it by options given with a
  // group: LibTorch 2.15 ignores options there of their class's default value, such as 0. Throws Error for a number
  // below 0, and for an optimizer that is none of LibTorch's or lockstep's, or has no weight decay.
  static void set_weight_decay(torch::optim::OptimizerParamGroup& group, double weight_decay);

  // Gives the averaged gradients that step() will use: of the parameters, or of this rank's slices. You may change
  // them; scale by the same factor on all ranks. A parameter that no rank used has none. Throws Error as step() does.
  std::vector<at::Tensor> gradients() const;

  // Writes the whole optimizer as a safetensors file: state by name, as "exp_avg.fc1.weight", and the options of the
  // groups, in their order. So any other layout and number of ranks, or one device, goes on from it with the same bits.
  // load() replaces state and options. Parameters that are frozen now lose their state, and parameters without state in
  // the file begin anew; a warning names either. Call both on all ranks; rank 0 writes, and the others return after it.
  // Throws Error, before anything is changed: a file that cannot be read or written; one of another network, of another
  // kind of optimizer, or of another number of groups; save() of a net with `average = false`. Cost of save(): an
  // allgather of the state where ranks have different parts of it.
  //
  // Without `strict` load() takes what fits of another network's file, as for fine-tuning. Options and groups stay as
  // they are here. A parameter whose name and shape the file's state does not have begins anew. The result lists the
  // parameters that begin anew (missing), and those whose state in the file was left out (unexpected), equal on all
  // ranks. A parameter of another shape is in both lists, and a frozen one in the second.
  void save(const std::filesystem::path& file);
  UnmatchedNames load(const std::filesystem::path& file, bool strict = true);

  class Parts;  // private: src/data_parallel/optimizer_parts.hpp

 protected:
  // The rest is for lockstep's own trainer and recorded steps, which take a step apart. Errors name `owner`.
  Optimizer(std::shared_ptr<TrainedNet> net, const Make& make, const Grouping& grouping,
            const std::string& owner = "Optimizer");
  void zero_grad(bool in_place);     // true: keeps the gradients' memory, as zeros, unless the net is sharded
  at::Tensor clip(double max_norm);  // gives the norm before; nothing waits for a GPU
  void update();                     // steps with the gradients as they are
  void begin_step(const StepOptions& options);  // counts a step, and compares the ranks' options; call it on all ranks

  // Throws Error if ranks have groups or steps with different options, on all ranks that see it. Call it on all ranks.
  void compare_options(const StepOptions& of_step = {}) const;

  // state() gives the state of the whole network, by name, equal on all ranks; load_state() sets it. Call them on all
  // ranks.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

  const std::shared_ptr<TrainedNet> net_;
  const std::shared_ptr<ShardedNet> sharded_;  // null: every rank has whole parameters
  const std::string name_;
  const std::unique_ptr<torch::optim::Optimizer> inner_;

 private:
  friend void check_replicas(const Optimizer& optimizer);

  static Make fused_maker(const torch::optim::SGDOptions& options);
  static Make fused_maker(const torch::optim::AdamOptions& options);
  static Make fused_maker(const torch::optim::AdamWOptions& options);
  template <class Kind, class Options>
  static Make maker(const Options& options) {
    return [options](Groups groups) { return std::make_unique<Kind>(std::move(groups), options); };
  }

  uint64_t steps_ = 0;
};

[[deprecated("lockstep::Optimizer::set_weight_decay")]] inline void set_weight_decay(
    torch::optim::OptimizerParamGroup& group, double weight_decay) {
  Optimizer::set_weight_decay(group, weight_decay);
}

}  // namespace lockstep
