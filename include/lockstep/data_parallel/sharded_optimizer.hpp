// ShardedOptimizer: divides an optimizer among the ranks, so that each keeps and computes one slice. With stage 2 it
// divides the gradients too, and with stage 3 the parameters (ZeRO; PyTorch calls stage 3 FSDP).
//
//   lockstep::DataParallel net(MyNet(), rank, {.average = false});
//   const auto make = [](auto slices) { return std::make_unique<torch::optim::Adam>(slices, 1e-3); };
//   lockstep::ShardedOptimizer adam(net, make, {.stage = 2});
//   for (auto& batch : …) {
//     adam.zero_grad();
//     net.loss(batch, criterion).backward();  // each rank gets its slice of the averaged gradients
//     adam.step();                            // updates it, and all ranks get all parameters
//   }
//
// Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5. The
// parameters stay equal on all ranks. They are those that the optimizer would give if every rank had all of it. A
// parameter for which no rank had a gradient is left alone, as on one device, also by momentum and weight decay.
//
// Used by its rank's thread only. Cost per step: a reduce-scatter of the gradients, in buckets, while backward computes
// others, and an allgather of the parameters. Together they send the bytes of the allreduce that they replace. With
// stage 3 an allgather in forward and one in backward: half as many bytes again. Each rank has 1 / ranks of the
// optimizer's state and work.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <lockstep/data_parallel/data_parallel.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class DividedParameters;
class ShardedReducer;
class TrainedParameters;
struct ShardedBucket;
struct WatchedTensor;

struct ShardedOptions {
  // 1: every rank keeps its own gradients in .grad, and the averages of its slice beside them. 2: a rank keeps only its
  // slice of the averaged gradients. Memory then holds whole gradients only of a bucket that is being reduced and of
  // one that is being filled. After backward() .grad is undefined, with one exception until step(): one parameter's
  // .grad is full of 1e30 (or of float16's largest number). This filler is never averaged. It lets step() notice who
  // clips or changes .grad. Its rows overlap, so that for a matrix it takes the memory of one row and one column.
  // 3: as 2, and a rank keeps only its slice of the parameters. A unit of them is gathered when an operator of LibTorch
  // is about to read one of its parameters, in forward or in backward, and given back when another unit is read. No
  // module has to know of it. Beside its slices memory then holds the parameters of the unit that computes and of the
  // next one, and the gradients of one unit, each while they are needed. A next unit that is large is not gathered
  // early: both together have at most the bytes of the largest unit and a tenth of the slices.
  // By grains (BatchOptions::grain) stages 2 and 3 keep whole gradients all the same during a backward, where a rank
  // has several grains: a sum for each block of grains that is not complete, at most 2 log2(grains) + 1.
  int stage = 1;
  // Stages 1 and 2: a bucket is full at this many bytes of gradients. Stage 3: the most bytes of a unit that is not
  // named; see `units`.
  int64_t bucket_bytes = 4 << 20;
  // false: every bucket is reduced after backward, which until then keeps all gradients. With stage 3 instead: a unit
  // is gathered and reduced when the one before it is done with, so that memory holds the parameters of one.
  bool overlap = true;
  // Stage 3. Names of modules, such as "layers.3", of each of which the parameters are one unit. Other modules are
  // taken in runs: at most a sixteenth of the net and an eighth of a rank's slice of it (64 KiB in a small one), and at
  // most bucket_bytes. A run below 64 KiB (or bucket_bytes, if that is less) takes one module more, however large. Best
  // are units that compute one after the other, and that are small beside a slice.
  std::vector<std::string> units = {};
};

class ShardedOptimizer {
 public:
  // Makes the optimizer of this rank's slices. Slices are flat tensors, one for each parameter of which the rank has
  // some values; with a small net a rank may have none. The optimizer must compute value by value, as SGD, Adam, AdamW,
  // Adagrad and RMSprop do. One that looks at a whole tensor's norm or shape would see the slice's. One group of
  // options counts for all parameters; see GroupsFactory for several.
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> slices)>;

  // The same with groups of parameters, each with options of its own. The constructor takes groups of the net's whole
  // parameters, as an optimizer on one device would. The factory gets the same groups of this rank's slices, with the
  // same options and in the same order; a group may be empty on a rank. So weights decay, and biases do not:
  //   lockstep::ShardedOptimizer adamw(net, lockstep::decay_groups(*net), [](auto groups) {
  //     auto made = std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
  //     lockstep::set_weight_decay(made->param_groups()[1], 0);
  //     return made;
  //   });
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using GroupsFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups groups)>;

  // From here on `net` averages its gradients through this optimizer, whatever its own options say. Its parameters move
  // into flat memory; those that need no gradient are left alone. Make one for each DataParallel, on all ranks. Throws
  // Error for an impossible option, if no parameter needs a gradient, if the factory makes nothing or an optimizer of
  // other tensors than the slices, in a run with RunOptions::elastic, and from stage 2 on for a net with a
  // SyncBatchNorm (ranks could wait for each other in a circle).
  //
  // With stage 3 every use of a parameter is a collective call. So all ranks must use the same ones in the same order;
  // a rank that does not is named by an Error. net.loss() passes empty parts through the layers. By grains a rank with
  // fewer of them computes stand-ins, whose results are dropped (Replica::loss_by_grains()), and all grains must use
  // the same parameters. Make a whole() before save_weights(), before evaluate(), and before one rank alone reads
  // parameters. Use the net on the thread that made this. Under autocast LibTorch keeps a copy of the parameters in the
  // lower precision from forward to backward, and that copy is whole. When this is destroyed, parameters that are not
  // whole are gone.
  template <class Module>
  ShardedOptimizer(DataParallel<Module>& net, const Factory& make, const ShardedOptions& options = {})
      : ShardedOptimizer(net.replica(), make, options) {}
  ShardedOptimizer(std::shared_ptr<Replica> replica, const Factory& make, const ShardedOptions& options = {});
  template <class Module>
  ShardedOptimizer(DataParallel<Module>& net, const Groups& groups, const GroupsFactory& make,
                   const ShardedOptions& options = {})
      : ShardedOptimizer(net.replica(), groups, make, options) {}
  ShardedOptimizer(std::shared_ptr<Replica> replica, const Groups& groups, const GroupsFactory& make,
                   const ShardedOptions& options = {});
  ~ShardedOptimizer();  // the DataParallel's later backwards throw Error, until it gets another one
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  // Makes all gradients undefined. Gradients of several backward() calls add up, as in LibTorch. With stage 2 each
  // backward is reduced and added to the slice, so that nothing is kept whole. A backward under DataParallel::no_sync()
  // leaves its gradients whole on the rank, and the next backward outside reduces them with its own. This saves
  // messages, and takes the memory of all gradients.
  void zero_grad();

  // Updates this rank's slice and gathers the parameters, with stage 3 when they are used. All ranks must call it. To
  // clip, call lockstep's clip_grad_norm (clip_grad_norm.hpp) between backward() and this. torch's would see only the
  // rank's own gradients with stage 1, and none with stage 2. A parameter without a gradient on some ranks counts as
  // one with zeros there. If no rank has a gradient of it, the parameter and its state stay as they are. With stage 1
  // .grad keeps the rank's own gradients afterwards. With stage 2 the gradients are used up: the next backward() begins
  // anew, also without zero_grad().
  //
  // Throws Error for a parameter that needed no gradient at first and needs one now; without averaged gradients, as
  // after backward() under no_sync() alone; if .grad was changed since backward(); and as Rank's collectives do. On a
  // GPU .grad is compared after the first three backward() calls only, since the host waits for it. (DataParallel's
  // backward() throws Error for a sparse gradient.)
  void step();

  // The averaged gradients that step() will use, in the order of a Factory's slices. Undefined for a parameter that no
  // rank used.
  std::vector<at::Tensor> gradients() const;

  const std::shared_ptr<Replica>& replica() const { return replica_; }  // the replica that it updates

  // While one lives, every rank has all parameters whole, as with the other stages: to evaluate, to save or to load
  // weights. What is changed in them is kept, if it is the same on all ranks. All ranks must call whole(). It costs an
  // allgather of the parameters with stage 3, and nothing otherwise.
  class Whole {
   public:
    explicit Whole(ShardedOptimizer& optimizer);
    ~Whole();
    Whole(const Whole&) = delete;
    Whole& operator=(const Whole&) = delete;

   private:
    const std::shared_ptr<DividedParameters> divided_;  // null: not stage 3
  };
  [[nodiscard]] Whole whole() { return Whole(*this); }

  // The optimizer of this rank's slices, for example to change its learning rate. Its state is this rank's part of the
  // whole.
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

  // The state of the whole optimizer by name, such as "exp_avg.fc1.weight". Its tensors have the parameters' shapes,
  // lie on the rank's device, and are equal on all ranks. So save_optimizer() can keep them, and another number of
  // ranks can load them. All ranks must call both functions. Cost of state(): an allgather of the state. Throws Error
  // for a state that cannot be kept, or that is of another kind of optimizer.
  using State = std::vector<std::pair<std::string, at::Tensor>>;
  State state();
  void load_state(const State& state);

 private:
  friend std::vector<WatchedTensor> slices_of_rank(const ShardedOptimizer& optimizer);

  using OfBuckets = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<ShardedBucket>&)>;
  ShardedOptimizer(std::shared_ptr<Replica> replica, const ShardedOptions& options, const OfBuckets& make);

  const std::shared_ptr<Replica> replica_;
  Rank rank_;
  const std::unique_ptr<const TrainedParameters> parameters_;
  const std::vector<ShardedBucket> buckets_;
  const std::shared_ptr<DividedParameters> divided_;  // null: not stage 3
  const std::shared_ptr<ShardedReducer> reducer_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace lockstep
