// Replica: one rank's copy of a network, equal to the other ranks', whatever its module's type is.
//
// DataParallel<Module> is a typed handle on one. What works with any network takes the Replica: Pipeline, a Balance.
// Used by its rank's thread only. Cost: see data_parallel.hpp.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/data/data.hpp>
#include <lockstep/models/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace lockstep {

class ArithmeticCheck;
class Averaging;
class CommunicationHook;
class GrainStatistics;
class Replica;
class SamplePlaces;
class ShardedNet;
class TrainedNet;
struct PartSizes;

// Ranks share this out among themselves, where otherwise each has all of it (ZeRO; Rajbhandari et al. 2020, section 5,
// stages 1 to 3; PyTorch calls the last one FSDP). docs/guide/zero.md has the costs of each.
enum class Sharded {
  nothing,
  state,       // each rank has a slice of the optimizer's state
  gradients,   // and of the averaged gradients
  parameters,  // and of the parameters, which are gathered when an operator is about to read them
};

struct DataParallelOptions {
  int64_t bucket_bytes = 4 << 20;          // a bucket is full when it holds this many bytes of gradients
  int64_t first_bucket_bytes = 256 << 10;  // the same for the first bucket: small, so that averaging starts early
  bool overlap = true;                     // false: every bucket is averaged after backward
  // false: backward() sends nothing, and each rank keeps its own gradients, for a LocalSgd (local_sgd.hpp) or for an
  // averaging of yours.
  bool average = true;
  // Averages each bucket in its own way (communication_hook.hpp). Each rank needs its own hook, which no other
  // DataParallel uses. Null: one allreduce per bucket, of the gradients as they are.
  std::shared_ptr<CommunicationHook> hook = nullptr;
  // Other than `nothing`: an Optimizer (optimizer.hpp) steps, and `.grad` is undefined outside of backwards, but for
  // the sums of backwards under no_sync(). With `parameters` every use of a parameter is a collective call, so that all
  // ranks must use the same ones in the same order, on the thread that made the net; a rank that does not is named by
  // an Error. Not in an elastic run (RunOptions::succession).
  Sharded sharded = Sharded::nothing;
  // For Sharded::parameters: names of modules, such as "layers.3", of each of which the parameters are gathered as one
  // unit. Other modules are taken in runs: at most bucket_bytes, a sixteenth of the net, and an eighth of a rank's
  // slice of it (64 KiB in a small one). Best are units that compute one after the other, and are small beside a slice.
  std::vector<std::string> units = {};
  // From 0 to 1: this fraction of the grains (BatchOptions::grain) is computed again by another rank, after backward,
  // and compared to the bit. If bits differ, all ranks compute that grain again, and backward() throws Error on all
  // ranks. Its text names the rank that most others contradict. With two ranks a third opinion is missing: a rank is
  // named if it contradicts itself, or else both are. 0: none. Training's bits stay the same. Cost: about this fraction
  // of a step's time, and the samples of these grains go to all ranks. With one rank nothing is computed again.
  // All batches need a grain. A function or criterion given to loss() is called again, also by ranks that do not own
  // the samples, until backward() has returned; SampleScope::current()->place().again is true then.
  double check_arithmetic = 0;
};

// The mean loss of one grain of a batch, see BatchOptions::grain.
struct GrainLoss {
  int64_t number = 0;
  int64_t size = 0;  // samples; 0: a stand-in, see Replica::loss_by_grains()
  at::Tensor mean = {};
};

// The mean loss of this rank's part of a batch. It is not a plain tensor, because its backward() also averages
// gradients.
//
// If the batch has a grain, it is the losses of this part's grains. Then backward() gives the same bits on any number
// of ranks: it computes the gradient of each grain's summed loss, and adds the grains of all ranks in one order.
class [[nodiscard]] Loss {
 public:
  Loss(const Loss&) = default;  // a move is a copy too
  Loss& operator=(const Loss&) = default;

  // Computes the gradients of this part, then averages them over all ranks (but see DataParallel::no_sync). Gradients
  // add up over several calls, as in LibTorch. A parameter that no rank has a gradient of stays without one, so that an
  // optimizer leaves it alone, as on one device. All ranks must call it, also those with an empty part. Throws Error: a
  // loss without a graph; cross_entropy's mean over some of a part's targets alone (ignore_index); a sparse gradient; a
  // parameter that was frozen when the DataParallel was made and is so no longer, or that was registered since; parts
  // that do not make up the global batch, or are of different batches (on all ranks); and as Rank::allreduce does.
  // After an exception this rank is out of step with the others: every later call throws.
  void backward();

  at::Tensor value() const { return local_mean_.detach(); }  // scalar: this part's mean loss, zero for an empty part
  double item() const { return value().item<double>(); }
  // The mean loss of the whole batch; of a part by in_parts(), of all ranks' parts. All ranks must call it. With a
  // grain it has the same bits on any number of ranks, so a learning rate may follow it. Throws as Rank::mean does.
  double global_item() const;

 private:
  friend class Replica;
  Loss(std::shared_ptr<Replica> replica, at::Tensor local_mean, double weight, int64_t local_size, int64_t global_size,
       int32_t mark);

  std::shared_ptr<Replica> replica_;
  at::Tensor local_mean_;
  double weight_;  // of this part, in the average over the ranks
  int64_t local_size_, global_size_;
  int32_t mark_;  // Batch::mark
  std::vector<GrainLoss> grains_ = {};
  std::vector<int64_t> runs_ = {};  // Batch::runs; empty: not by grains
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

// `accumulate` uses it from Sharded::gradients on (adds_up_parts()). While it lives, each backward() is of a part of
// a step: it is averaged at once, and the averages add up with that of the next backward() without it. All ranks must
// make as many. So no rank keeps gradients whole, as it does under NoSync; each part costs an exchange.
class PartOfStep {
 public:
  explicit PartOfStep(std::shared_ptr<Replica> replica);
  ~PartOfStep();
  PartOfStep(const PartOfStep&) = delete;
  PartOfStep& operator=(const PartOfStep&) = delete;

 private:
  std::shared_ptr<Replica> replica_;
};

// While one lives, every rank has all parameters of its net whole, and the module may be reached by `net->` and `*net`:
// to evaluate, to save or to load weights. What is changed in the parameters is kept, if it is the same on all ranks.
// All ranks must make it. Cost: an allgather of the parameters with Sharded::parameters, and nothing otherwise.
class [[nodiscard]] Whole {
 public:
  explicit Whole(std::shared_ptr<Replica> replica);
  ~Whole();
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;

 private:
  std::shared_ptr<Replica> replica_;
};

// Made by std::make_shared: a Loss and a NoSync keep it alive. Where its Rank's run() is over, backwards throw Error.
class Replica : public std::enable_shared_from_this<Replica> {
 public:
  // Moves `module` to the rank's device and copies rank 0's parameters and buffers to all ranks. Throws Error on every
  // rank if the ranks' modules differ in their number of tensors, a name, a shape or a type; a null module; an option
  // below 1.
  Replica(std::shared_ptr<torch::nn::Module> module, Rank& rank, const DataParallelOptions& options);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  torch::nn::Module& module() const { return *module_; }
  Rank& rank() { return rank_; }

  // See DataParallel's functions of these names. `mark` is the batch's, 0 where that is not known; the sizes of
  // backward_through are of the rank's part and of its batch, which the parts must make up, 0 where they are not known.
  Loss mean(at::Tensor local_mean, int64_t local_size, int64_t global_size, int32_t mark = 0);
  double weight_of(int64_t local_size, int64_t global_size) const;
  void backward_through(const std::function<void()>& compute, int64_t local_size = 0, int64_t global_size = 0,
                        int32_t mark = 0);
  NoSync no_sync();
  bool adds_up_parts() const;  // see PartOfStep

  // By grains: calls mean_of(grain) for each grain of this rank's part, ascending; it must give the mean loss of the
  // grain's samples. loss_by_grains() computes them all, and keeps their graphs for Loss::backward().
  // backward_by_grains() computes each grain's gradients at once, as Loss::backward() does, and returns the part's mean
  // loss, a double. backward_in_grains() leaves it to compute() to call forward_grain(number, forward) and
  // backward_grain(number, backward) for each grain, as a pipeline does. They throw Error: a batch whose samples are
  // not this rank's grains; more than one intra-op thread; layers whose results depend on the ranks (SyncBatchNorm,
  // LibTorch's dropout); averages that do (a communication hook, none at all); backward_in_grains() with
  // check_arithmetic, since a pipeline's ranks hold some layers each; as Loss::backward() does.
  //
  // With Sharded::parameters all ranks must compute the layers equally often. So a rank with fewer grains
  // than another one calls mean_of() for stand-ins too, after its grains: for two samples, or one if a grain has one.
  // The result is dropped, and SampleScope::current()->place().again is true then. The module's buffers are then
  // as before. Throws Error also: a batch without samples, without Batch::like or with one that is not like x, y and
  // `more`; a part by in_parts() of a batch without Batch::runs.
  using MeanOf = std::function<at::Tensor(const Batch& grain)>;
  Loss loss_by_grains(const Batch& batch, const MeanOf& mean_of);
  at::Tensor backward_by_grains(const Batch& batch, const MeanOf& mean_of);
  void backward_in_grains(const Batch& batch, const std::function<void()>& compute);
  void forward_grain(int64_t number, const std::function<void()>& forward);
  void backward_grain(int64_t number, const std::function<void()>& backward);

  int64_t steps_done() const;
  void set_steps_done(int64_t steps);

  // Where the samples of this rank's part of `batch`, which it computes next, stand in the global batch.
  SamplePlace place_of(const Batch& batch);

  // Throws Error if parameters were changed by gradients that were never averaged.
  void check_that_steps_were_averaged() const;

  // Whether an empty part must go through the layers all the same, because one of them exchanges in its forward, or the
  // parameters are divided among the ranks.
  bool forwards_empty_parts() const;

  // If parameters that are divided among the ranks could not be gathered, an operator throws LibTorch's exception. This
  // then throws what failed.
  void rethrow_failure() const;

  // Lets a caller time backwards, as Balance does. computed() runs when all that this rank itself computes in a
  // backward is queued (on the CPU: computed), before it waits for the other ranks' gradients. averaged() runs when
  // these are averaged. Neither runs under no_sync. Throws Error: somebody watches already; the replica does not
  // average, or waits within backward.
  void watch_backwards(std::function<void()> computed, std::function<void()> averaged);
  void stop_watching() noexcept;

  // Whether its last backward was by grains. Then BatchNorm's running statistics are the same on all ranks.
  bool was_by_grains() const { return by_grains_; }

  // Its backwards no longer compare the ranks' networks, since the caller does.
  void leave_comparing();

  // For checkpoints: what was learnt of the order of the gradients, as far as the averages' bits depend on it. Empty
  // before that. An order that is not one of these parameters is not taken: it is learnt anew.
  std::vector<int64_t> learnt_order() const;
  void set_learnt_order(const std::vector<int64_t>& order);

  Averaging* averaging() const { return averaging_.get(); }                // null: it does not average
  const std::shared_ptr<ShardedNet>& sharded() const { return sharded_; }  // null: nothing is sharded

  // The module is a part of a SplitModel's network, whose other parts other ranks hold: no Optimizer takes it alone.
  void become_part() { is_part_ = true; }
  bool is_part() const { return is_part_; }

  // Throws Error if the net is sharded, and neither a Whole lives nor a loss() is computed.
  void check_module_is_open() const;

 private:
  friend class Loss;
  friend class NoSync;
  friend class PartOfStep;
  void refuse_loss_without_graph() const;
  void check_that_no_parameter_is_new() const;
  void set_averaging(std::shared_ptr<Averaging> averaging);
  void check_targets(const at::Tensor& mean, int64_t samples, int64_t of_batch);
  void set_sync(bool sync);
  Batch checked_grains(const Batch& batch);
  at::Tensor mean_of_grain(const Batch& grain, SamplePlace place, const MeanOf& mean_of);
  int64_t stand_ins_of(const Batch& part) const;
  at::Tensor mean_of_stand_in(const Batch& part, SamplePlace place, const MeanOf& mean_of);
  void backward_turn(int64_t number, int64_t stand_ins, const std::function<void()>& backward);
  void backward_of_grains(const std::function<void()>& compute, const std::vector<int64_t>& runs,
                          const PartSizes& sizes);
  void backward_of_losses(const Loss& loss);
  void backward_of(const GrainLoss& grain, int64_t stand_ins);
  void backward_of_parts(const std::function<void()>& compute, const PartSizes& sizes);

  const std::shared_ptr<torch::nn::Module> module_;
  Rank rank_;
  std::shared_ptr<ShardedNet> sharded_;
  std::shared_ptr<Averaging> averaging_;
  std::unordered_set<const c10::TensorImpl*> parameters_;  // when the replica was made
  bool is_part_ = false;
  bool sync_ = true;
  bool partial_ = false;     // a PartOfStep lives
  bool by_grains_ = false;   // see was_by_grains()
  int targets_checked_ = 0;  // means, on a GPU
  int64_t waiting_ = 0;      // samples of the parts whose gradients the next averaged backward averages with its own
  const std::unique_ptr<SamplePlaces> places_;
  std::unique_ptr<GrainStatistics> statistics_;  // null before the first batch with a grain
  std::unique_ptr<ArithmeticCheck> arithmetic_;  // null without check_arithmetic
  std::function<void()> computed_, averaged_;    // see watch_backwards(); empty: nobody watches
};

// Gives an Optimizer what it steps, for a net of one replica a rank.
std::shared_ptr<TrainedNet> trained_net(const std::shared_ptr<Replica>& replica);

}  // namespace lockstep
