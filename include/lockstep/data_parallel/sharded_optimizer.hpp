// ShardedOptimizer: an optimizer of which each rank keeps and computes one slice, and on request one slice of the
// gradients too (ZeRO, stages 1 and 2).
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
// parameters stay equal on all ranks, and are those of the optimizer on every rank's whole parameters. A parameter that
// no rank had a gradient of is left alone, as on one device: by momentum and weight decay too. Used by its rank's
// thread only. Cost per step: a reduce-scatter of the gradients, in buckets, while backward still computes others, and
// an allgather of the parameters, together the bytes of the allreduce that they replace; 1 / ranks of the optimizer's
// state and work.
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

class ShardedReducer;
class TrainedParameters;
struct ShardedBucket;

struct ShardedOptions {
  // 1: every rank keeps its own gradients in .grad, and the averages of its slice beside them. 2: a rank keeps its
  // slice of the averaged gradients alone; beside it there are in memory, of the whole gradients, those of a bucket
  // that is being reduced and of one that is being filled, and .grad is undefined after backward(). But until
  // step() the smallest parameter's is there, if it has at most 4096 values: filled with 1e30 (or float16's largest
  // number), which nothing averages, so that step() sees who clips or changes .grad.
  int stage = 1;
  int64_t bucket_bytes = 4 << 20;  // a bucket is full when it holds as many bytes of gradients
  bool overlap = true;  // false: every bucket is reduced after backward, which until then keeps all gradients
};

class ShardedOptimizer {
 public:
  // Makes the optimizer of this rank's slices: flat tensors, one for each parameter of which the rank has some values,
  // or of a small net maybe none at all. It must compute value by value, as SGD, Adam, AdamW, Adagrad and RMSprop do;
  // one that looks at a whole tensor's norm or shape would see the slice's. One group of options counts for all
  // parameters.
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> slices)>;

  // From here on `net` averages its gradients through this optimizer, whatever its own options say, and its parameters
  // lie in flat memory; those that need no gradient are left alone. One for each DataParallel; all ranks must make it.
  // Throws Error: an option that cannot be, no parameter that needs a gradient, a factory that makes nothing, or an
  // optimizer of other tensors than the slices, stage 2 for a net with a SyncBatchNorm (ranks could wait for each other
  // in a circle).
  template <class Module>
  ShardedOptimizer(DataParallel<Module>& net, const Factory& make, const ShardedOptions& options = {})
      : ShardedOptimizer(net.replica(), make, options) {}
  ShardedOptimizer(std::shared_ptr<Replica> replica, const Factory& make, const ShardedOptions& options = {});
  ~ShardedOptimizer();  // the DataParallel's later backwards throw Error, until it gets another one
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  // Gradients become undefined. Those of several backward() calls add up, as in LibTorch: with
  // stage 2 each is reduced and added to the slice's, so that nothing is kept whole. Under DataParallel::no_sync() a
  // backward leaves its gradients on the rank, whole, for the next one outside to reduce with its own: fewer messages
  // for the memory of all gradients.
  void zero_grad();

  // Updates this rank's slice and gathers the parameters. Between backward() and this, clip with lockstep's
  // clip_grad_norm (clip_grad_norm.hpp): torch's sees the rank's own shares with stage 1, and nothing with stage 2. A
  // parameter without a gradient on some ranks counts as one with zeros there; without one on all ranks it stays what
  // it is, and so does its state. With stage 2 it uses the gradients up: the next backward() begins anew also without
  // zero_grad(). All ranks must call it. With stage 1 the .grad that it leaves are the rank's shares. Throws Error: a
  // parameter that needed no gradient at first and does now; no averaged gradients, as after backward() under no_sync()
  // alone; .grad that was changed since backward(); and as Rank's collectives do.
  // (DataParallel's backward() throws Error: a sparse gradient.)
  void step();

  // The averaged gradients that step() will use, in the order of the factory's slices: undefined for a parameter that
  // no rank used.
  std::vector<at::Tensor> gradients() const;

  const std::shared_ptr<Replica>& replica() const { return replica_; }  // for what works with both

  // The optimizer of this rank's slices: for changing its learning rate; its state is this rank's part of the state.
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

  // The state of the whole optimizer by name, "exp_avg.fc1.weight": with the shapes of the parameters, on the rank's
  // device, equal on all ranks. So it can be kept (save_optimizer() does), and given to another
  // number of ranks. All ranks must call both; cost of state(): an allgather of the state. Throws Error: a state that
  // cannot be kept, or of another kind of optimizer.
  using State = std::vector<std::pair<std::string, at::Tensor>>;
  State state();
  void load_state(const State& state);

 private:
  const std::shared_ptr<Replica> replica_;
  Rank rank_;
  const std::unique_ptr<const TrainedParameters> parameters_;
  const std::vector<ShardedBucket> buckets_;
  const std::shared_ptr<ShardedReducer> reducer_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace lockstep
