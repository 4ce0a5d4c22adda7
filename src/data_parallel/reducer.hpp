// Reducer: averages a replica's gradients over the ranks, bucket by bucket, while backward still computes others.
//
// A bucket is a flat piece of memory that holds the gradients of several parameters of one type; each parameter's .grad
// is a view into it. A hook behind each parameter's gradient accumulator notes that its gradient is there. When a
// bucket's last gradient is there, and all buckets before it have been posted, its allreduce is posted on the rank's
// backend. So every rank posts every bucket once per backward and in the same order, whatever it computed, and nothing
// can wait for a parameter that some rank did not use. With a CommunicationHook a bucket may take several rounds; their
// order is as fixed: see take_turns().
//
// Buckets follow the order in which gradients become ready: at first the reverse of registration, and after the first
// backward in which rank 0 had a gradient the order that rank 0 has seen, on all ranks.
//
// Hooks run on the thread that computes (on GPUs: autograd's thread of the device, with the gradient's stream current);
// they post and poll, and never wait. Everything else runs on the rank's thread.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "averaging.hpp"
#include "backward_report.hpp"
#include "gradient_hook.hpp"
#include "unaveraged_gradients.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class Reducer : public Averaging {
 public:
  // The parameters by name, in the order of registration. Those that need no gradient are left out and must stay so;
  // one of two names counts once. Throws Error: an option below 1, a hook that another DataParallel has.
  Reducer(const std::vector<std::pair<std::string, at::Tensor>>& parameters, Rank& rank,
          const DataParallelOptions& options);
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  void listen(bool last) override;
  void check_that_steps_were_averaged() override;

  // Where Gloo or NCCL add, the order of additions follows a gradient's place in its bucket.
  std::vector<int64_t> order() const override;
  void set_order(const std::vector<int64_t>& order) override;

 private:
  struct Slot {  // one parameter's place
    std::string name;
    at::Tensor parameter;
    std::unique_ptr<GradientHook> hook = {};
    size_t bucket = 0;
    at::Tensor view = {};  // in the bucket, with the parameter's shape and strides
    bool ready = false;
    bool had = false;     // a gradient of its own, before fill()
    bool unused = false;  // no rank had one, when the ranks last told each other
  };

  struct Bucket {
    GradientBucket gradients;  // of the slots, in their order
    std::vector<size_t> slots;
    size_t missing = 0;                              // slots that are not ready yet
    Round round = {};                                // that was begun last
    std::unique_ptr<at::RecordFunction> range = {};  // on a profiler's timeline, if one runs: from post to completion
  };

  // Gradients that `backward` did not touch become averages of what they were before.
  void average(const std::function<void()>& backward, const PartSizes& sizes) override;
  void abandon() override;

  void on_gradient(size_t slot);  // the hook
  void fill(Slot& slot);          // makes .grad the slot's view, without changing its value
  void check_that_frozen_stay_frozen() const;
  // Begins what rounds can be begun, in the one order of all ranks: in turn t bucket t's first, then the next of each
  // earlier bucket that has one. Stops at a bucket that is not ready, or, unless it may wait, at a round that is not
  // complete.
  void take_turns(bool may_wait);
  void post(size_t bucket);                   // its first round
  bool complete(const Bucket& bucket) const;  // its present round is
  void go_on(Bucket& bucket);                 // with its next round, once the one before is complete
  void end(Bucket& bucket);                   // after its last round
  void poll();                                // open works, so that backends without a thread of their own get on
  void start();                               // before backward
  void finish(const PartSizes& sizes);        // after backward: what is missing, then waits
  void leave_unused_undefined(bool reported);
  void learn_order();                                                // once: all ranks agree on rank 0's order
  void follow(std::vector<int64_t> order);                           // from here on
  void make_buckets(const std::vector<size_t>& order, size_t used);  // the first `used` slots apart from the rest
  void warn_of_unused(const std::vector<std::string>& names) const;

  Rank rank_;
  const DataParallelOptions options_;
  std::vector<std::pair<std::string, at::Tensor>> frozen_;  // parameters that need no gradient
  std::optional<c10::Stream> poll_stream_;                  // see poll(); all of a hook's work is on it
  BackwardReport report_;

  std::mutex mutex_;  // guards all below: hooks run on autograd's threads
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;      // in the order in which they are posted
  size_t next_bucket_ = 0;           // all before it are posted
  size_t turn_ = 0;                  // how many buckets are before this turn's, whose next rounds are part of it
  size_t place_ = 0;                 // the first of them that this turn has not come to
  std::vector<size_t> open_;         // posted buckets that were not complete when last polled
  bool active_ = false;              // between start() and finish(): hooks only note outside
  UnaveragedGradients alone_;        // of backwards outside, since the last start()
  bool listening_ = true;            // see listen()
  std::vector<int64_t> order_;       // of the slots in which rank 0 had a gradient; empty until it is learnt
  std::vector<size_t> ready_order_;  // of slots, in this backward
};

}  // namespace lockstep
