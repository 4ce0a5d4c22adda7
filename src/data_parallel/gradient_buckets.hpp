// GradientBuckets: notes which gradients of a backward are there, and has each bucket of them averaged over the ranks
// while backward still computes others. The Reducer and the ShardedReducer say how a bucket is averaged.
//
// A bucket is a set of parameters whose gradients travel together. A hook behind each parameter notes that its gradient
// is there and collects it into the bucket's memory.
//
//   1. A bucket is posted once per averaged backward: when its last gradient is there and every bucket before it is
//      posted, or else after backward. So all ranks post the same buckets in the same order, whatever each computed,
//      and none waits for a parameter that another rank did not use.
//   2. The order is at first the reverse of registration. After the first backward in which rank 0 had a gradient it
//      follows the order in which rank 0 got them, on all ranks.
//   3. By grains, a gradient leaves .grad as soon as it is there, and without overlap at its grain's end. Between
//      grains all .grad are undefined. A linear layer hands over factors, and .grad stays undefined.
//   4. Hooks run on the thread that computes: on GPUs autograd's thread of the device, with the gradient's stream
//      current. They post and poll. Everything else runs on the rank's thread. mutex_ guards what both use.
#pragma once

#include <ATen/record_function.h>

#include "averaging.hpp"
#include "backward_report.hpp"
#include "gradient_hook.hpp"
#include "grain_exchange.hpp"
#include "grain_sums.hpp"
#include "models/linear_products.hpp"
#include "unaveraged_gradients.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace lockstep {

class GradientBuckets : public Averaging {
 public:
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  void listen(bool last) override;
  void check_that_steps_were_averaged() override;
  void begin_grains(const GrainPlan& plan) override;
  void open_grain(int64_t number, int64_t stand_ins) override;
  void close_grain() override;
  bool take_factors(const at::Tensor& parameter, const GradientFactors& factors) override;

 protected:
  struct Slot {  // one parameter's place
    std::string name;
    at::Tensor parameter;
    at::ScalarType type = parameter.scalar_type();  // when this was made
    size_t bucket = 0;
    size_t place = 0;      // in its bucket, by grains
    at::Tensor view = {};  // of its gradient, in its bucket's memory, with the parameter's shape and strides
    bool ready = false;    // its gradient is there, in this backward
    bool taken = false;    // by grains: the open grain's gradient is added up
    std::optional<GradientFactors> factors = {};  // of the open grain's gradient, in the place of .grad
    bool had = false;                             // this rank computed one; false: it stands for zeros
    bool used = false;                            // some rank had one, when the ranks last told each other
    bool adds = false;                            // to an average that it had before this backward
    at::Tensor before = {};                       // by grains: the gradient to which the average is added
    std::unique_ptr<GradientHook> hook = {};
  };

  struct Bucket {
    std::vector<size_t> slots = {};
    size_t missing = 0;                              // slots that are not ready yet
    bool posted = false;                             // in this backward
    std::unique_ptr<at::RecordFunction> range = {};  // on a profiler's timeline, from post to completion
    std::unique_ptr<GrainSums> sums = {};            // null before the first grain
  };

  // Errors begin with the rank's name and `owner`: what the user calls it. `collective` is for the profiler.
  GradientBuckets(const Rank& rank, const std::string& owner, std::string collective, bool overlap);

  // All of these are called under mutex_.
  virtual void collect(size_t slot) = 0;  // moves .grad, or zeros, into the bucket's memory
  virtual bool keeps_whole() const = 0;   // a gradient stays in its bucket's memory until the next backward
  virtual void post(size_t bucket) = 0;   // begins to average it
  virtual void poll() = 0;                // moves open works on, for backends without a thread of their own
  virtual void complete() = 0;            // waits for all buckets
  virtual void before_backward() {}
  virtual void after_backward(bool /*partial*/) {}  // after it, when all is averaged
  // After a failure: forgets what was posted. If queues_calls_, the stream to which memory goes back waits for it.
  virtual void leave_open() {}
  // Whether each rank has all values of the parameters, so that an optimizer of its own gradients could change them.
  virtual bool may_change_alone() const { return true; }
  // Takes the order in which rank 0 got its gradients: slots, without those that it had none of.
  virtual void follow(const std::vector<size_t>& order) = 0;
  // Begins what can be begun, in the one order of all ranks. Stops at a bucket that is not ready and, unless it may
  // wait, at what is not complete.
  virtual void take_turns(bool may_wait);

  // By grains: a bucket's flat memory has so many columns, in equal slices of the ranks, and view_in gives a slot's
  // part of such memory. leave_gradients() makes .grad what is to be there after the backward.
  virtual int64_t columns_of(size_t bucket) const = 0;
  virtual at::Tensor view_in(size_t slot, const at::Tensor& flat) const = 0;
  virtual void leave_gradients() = 0;
  // Memory for a bucket's first sum over grains, of columns_of() values that nothing needs; undefined: there is none.
  virtual at::Tensor row_of(size_t bucket) const = 0;
  virtual bool in_slices() const { return false; }  // a rank gets only its slice of the averages
  // Before the first grain. Throws Error if the way to average depends on the ranks.
  virtual void before_grains() {}

  // Before backward; not under mutex_.
  virtual void check() {}

  void add_slot(const std::string& name, const at::Tensor& parameter);
  bool next_is_ready() const;
  void post_next();
  void refuse_sparse(const Slot& slot) const;
  [[noreturn]] void refuse_growth(const Slot& slot) const;
  bool records() const;  // a CUDA graph records this step
  bool by_grains() const { return plan_.has_value(); }
  // Begins to average a bucket that has all its gradients. `target` becomes the average, or this rank's slice of it:
  // in_slices().
  HookRound post_average_of_grains(size_t bucket, const at::Tensor& target);

  Rank rank_;
  const bool queues_calls_;
  std::mutex mutex_;  // guards all below
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
  std::vector<size_t> order_;  // of buckets, in which they are posted
  size_t next_ = 0;            // in order_: all before it are posted
  bool learnt_ = false;        // order_ follows rank 0

 private:
  void average(const std::function<void()>& backward, const PartSizes& sizes) override;
  void abandon() override;

  void on_gradient(size_t slot);  // the hook
  void on_grain_gradient(size_t slot);
  void take_grain_gradient(size_t slot);
  void refuse_gradients_from_outside();
  void end_grains();
  void check_types() const;
  void start();
  void finish(const PartSizes& sizes);
  BackwardReport::Compared compared_parameter();  // with the other ranks, in this backward
  void leave_unused_undefined(bool reported);
  void learn_order();
  void warn_of_unused() const;

  std::unordered_map<const at::TensorImpl*, size_t> slot_of_;  // of each parameter
  const std::string collective_;
  const bool overlap_;
  BackwardReport report_;
  size_t turns_ = 0;                 // backwards in which a parameter was compared
  UnaveragedGradients alone_;        // of backwards outside, since the last start()
  std::vector<size_t> ready_order_;  // of slots, in this backward
  bool active_ = false;              // between start() and finish(): hooks only note outside
  bool listening_ = true;            // see Averaging::listen()
  std::optional<GrainPlan> plan_;    // empty: not by grains
  Range run_;                        // this rank's grains
  std::optional<int64_t> grain_;     // the one that is open, or kStandIn
  bool last_grain_ = false;          // none follows it, nor a stand-in
  bool outside_ = false;             // a backward outside added to a gradient, since the last start()
};

}  // namespace lockstep
