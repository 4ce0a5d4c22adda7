// ShardedReducer: averages a replica's gradients over the ranks so that each rank gets its slice of them, bucket by
// bucket, while backward still computes others. Of a ShardedOptimizer, in the place of the Reducer.
//
// A hook behind each parameter notes that its gradient is there. When a bucket's last gradient is there, and all
// buckets before it have been posted, its reduce_scatter is posted. So every rank posts every bucket once per backward
// and in the same order, whatever it computed. With stage 2 a gradient moves into its bucket's flat memory as soon as
// it is there, and that memory goes to another bucket once it is reduced; a bucket is posted only when the one before
// it is reduced, so that no more than these two are in memory, and those that have begun to fill.
//
// The order in which buckets are posted is at first the reverse of registration, and after the first backward in which
// rank 0 had a gradient the order in which rank 0 completed them, on all ranks. The averages' bits do not depend on it:
// a parameter stays at its place in its bucket.
#pragma once

#include <ATen/record_function.h>
#include <lockstep/data_parallel/sharded_optimizer.hpp>

#include "averaging.hpp"
#include "backward_report.hpp"
#include "gradient_hook.hpp"
#include "sharded_parameters.hpp"
#include "unaveraged_gradients.hpp"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep {

class ShardedReducer : public Averaging {
 public:
  ShardedReducer(const std::vector<ShardedBucket>& buckets, Rank& rank, const ShardedOptions& options);
  ShardedReducer(const ShardedReducer&) = delete;
  ShardedReducer& operator=(const ShardedReducer&) = delete;

  void listen(bool last) override;
  void check_that_steps_were_averaged() override;
  bool in_slices() const override { return true; }
  std::vector<std::pair<std::string, at::Tensor>> slices() override;
  bool waits_in_backward() const override { return !keeps_whole(); }

  void zero_grad();

  // No .grad is a filler any longer: see left_.
  void take_filler_away();

  // The slices' gradients, for an update. Throws Error if nothing was averaged.
  void use();
  std::vector<at::Tensor> gradients();  // of this rank's pieces, in their order; undefined where no rank had one

 private:
  struct Slot {  // one parameter's place
    ShardedBucket::Place place;
    size_t bucket;
    at::Tensor view = {};  // of its gradient, in its bucket's memory; undefined while that has none
    bool ready = false;
    bool had = false;   // a gradient on this rank, in this backward
    bool used = false;  // on any rank, in what is averaged by now
    std::unique_ptr<GradientHook> hook = {};
  };

  struct Bucket {
    ShardedBucket parameters;
    std::vector<size_t> slots;
    at::Tensor gradient;                             // of its slice
    at::Tensor memory = {};                          // of all its gradients; with stage 2 only while it has some
    at::Tensor piece = {};                           // stage 2: what memory is a part of
    bool shares_piece = false;                       // which goes to another bucket afterwards
    at::Tensor average = {};                         // where the reduction that is under way puts the slice's
    size_t missing = 0;                              // slots that are not ready yet
    bool posted = false;                             // in this backward
    bool adds = false;                               // stage 2: to what an earlier backward has left
    c10::intrusive_ptr<c10d::Work> work = {};        // null: not under way
    std::unique_ptr<at::RecordFunction> range = {};  // on a profiler's timeline, if one runs
  };

  // Afterwards the gradient of each bucket's slice is the average of all that was computed since zero_grad() or use().
  void average(const std::function<void()>& backward, const PartSizes& sizes) override;
  void abandon() override;

  bool keeps_whole() const { return options_.stage == 1; }
  void check_averaged() const;
  at::Tensor gradient_of(const Slot& slot) const;  // of its piece; undefined if no rank had one
  void note_used();                                // after the report
  void note_left();                                // in .grad
  void forget_left();                              // and takes a filler away
  void check_unchanged();
  void on_gradient(size_t slot);  // the hook
  void collect(Slot& slot);       // moves .grad, or zeros, into the bucket's memory
  void take_memory(Bucket& bucket);
  void give_memory(Bucket& bucket);
  void post_ready_buckets();  // in order, as far as they are ready
  void post(Bucket& bucket);
  void complete_oldest();  // waits for it
  void poll();             // so that backends without a thread of their own get on
  void start();
  void finish(const PartSizes& sizes);
  void learn_order();

  Rank rank_;
  const ShardedOptions options_;
  BackwardReport report_;

  std::mutex mutex_;  // guards all below: hooks run on autograd's threads
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> order_;  // of buckets, in which they are posted
  size_t next_ = 0;            // in order_: all before it are posted
  std::deque<size_t> open_;    // buckets under way
  // Stage 2: two pieces of memory for each type, as large as its largest bucket, that go from bucket to bucket. A
  // bucket that finds none has one of its own meanwhile.
  struct Pieces {
    int64_t size = 0;  // elements
    int made = 0;
    std::vector<at::Tensor> spare = {};
  };
  std::map<at::ScalarType, Pieces> pieces_;
  bool active_ = false;  // between start() and finish(): hooks only note outside
  bool listening_ = true;
  bool averaged_ = false;  // there is something to use()
  bool learned_ = false;
  // What the last average left in .grad of the smallest parameter that was used, and its values then. Who changes it
  // changes nothing of the step. With stage 2, which leaves nothing there, it is a filler, so that torch's clipping
  // finds something to change.
  size_t smallest_ = 0;
  at::Tensor left_, values_left_;
  int compared_ = 0;
  UnaveragedGradients alone_;      // of backwards outside, since the last start()
  std::vector<size_t> completed_;  // buckets, in this backward
};

}  // namespace lockstep
