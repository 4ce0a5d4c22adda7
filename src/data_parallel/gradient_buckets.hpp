// GradientBuckets: averages a replica's gradients over the ranks during its backward. It notes which gradients are
// there, and has each bucket averaged while backward still computes others. The Reducer and the ShardedReducer say how
// a bucket is exchanged; GrainTerms adds up gradients of grains.
//
// A bucket is a set of parameters whose gradients travel together. A hook behind each parameter notes that the gradient
// is there, and collects it into the bucket's memory. A single rank without a communication hook uses no buckets, and
// learns no order, before its first grain.
//
//   1. A bucket is posted once per averaged backward: when its last gradient is there and every earlier bucket is
//      posted, or else after backward. So all ranks post the same buckets in the same order, whatever each computed,
//      and none waits for a parameter that another rank did not use.
//   2. The order is at first the reverse of registration. After the first backward in which rank 0 had a gradient, the
//      order is that in which rank 0 got them, on all ranks.
//   3. Hooks run on the thread that computes: on GPUs autograd's thread of the device, with the gradient's stream
//      current. They post and poll. Everything else runs on the rank's thread. mutex_ guards what both use.
#pragma once

#include "backward_report.hpp"
#include "grain_terms.hpp"
#include "loop_warnings.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep {

class GradientBuckets {
 public:
  virtual ~GradientBuckets() = default;
  GradientBuckets& operator=(GradientBuckets&&) = delete;

  // Runs `backward`, which adds to the parameters' gradients. Returns when all gradients are averages over the ranks,
  // also those that `backward` did not touch. If no rank has a gradient of a parameter, the parameter gets none. Call
  // it on all ranks. If it throws, every later call throws an Error with the reason, because this rank may owe the
  // others gradients. Throws Error on all ranks if the parts do not make up the batch; and if a gradient of one rank
  // alone has changed parameters since.
  void average_during(const std::function<void()>& backward, const PartSizes& sizes);

  void end(const std::string& reason) { failure_ = reason; }  // each later average_during() throws Error with `reason`

  // Leaves comparing the ranks' networks to the caller, who can say more of a difference.
  void leave_comparing() { compares_ = false; }

  // Says whether gradients from now on are the parameters' last ones in this backward, and may be averaged. At first
  // they are.
  void listen(bool last);

  // order() gives the learnt order of the gradients, as far as the averages' bits depend on it: the number of
  // parameters, then the parameters' numbers. It is empty while nothing was learnt, and equal on all ranks. A run that
  // goes on with it takes the same steps as the run before. set_order ignores numbers below 0. If an order does not fit
  // the parameters, it is learnt anew.
  std::vector<int64_t> order() const;
  void set_order(const std::vector<int64_t>& order);

  // By grains, call begin_grains() before the first grain of a step, and compute each grain between open_grain() and
  // close_grain(). The next averaged backward ends the step. The average is the grains' sum in one order, divided by
  // the batch's samples. See GrainTerms. Throws Error also for a way to average that depends on the ranks.
  void begin_grains(const GrainPlan& plan);
  void open_grain(int64_t number, int64_t stand_ins = 0);
  void close_grain();

  // Takes a gradient's factors in backward: a grain keeps them, and else the product goes straight to the bucket. Gives
  // false if nothing is taken.
  bool take_factors(const at::Tensor& parameter, const GradientFactors& factors);

 protected:
  struct Kind {
    std::string collective;        // the collective's name, for the profiler
    bool overlap = true;           // buckets are averaged while backward computes
    bool in_slices = false;        // a rank gets its slice of the averages, and .grad does not stay
    bool may_change_alone = true;  // each rank has all parameters, which an optimizer of its own gradients could change
    std::shared_ptr<GrainCheck> check = nullptr;  // is told of the grains' gradients; null: nobody is
  };
  GradientBuckets(const Rank& rank, const Kind& kind, bool uses_buckets = true);

  // These say how buckets are exchanged. Call all of them under mutex_.
  virtual void begin(bool by_grains) = 0;  // begins a step; throws Error if it cannot be averaged
  virtual void collect(size_t slot) = 0;   // moves .grad, or zeros, into the bucket's memory
  // Computes a gradient from its factors in the bucket's memory, which .grad becomes. Gives false where there is a
  // gradient already, or no such memory.
  virtual bool take_product(size_t /*slot*/, const GradientFactors& /*factors*/) { return false; }
  virtual void post(size_t bucket) = 0;  // begins to average the bucket
  // Posts buckets that are ready, and moves open works on, in the one order of all ranks. Stops at a bucket that is not
  // ready and, unless it may wait, at what is not complete.
  virtual void move_on(bool may_wait) = 0;
  // Waits for all buckets; then the averages are where they belong. `partial`: other parts of the step follow.
  virtual void complete(bool partial) = 0;
  // After a failure: forgets what was posted. If queues_calls_, the stream to which memory goes back waits for it.
  virtual void abandon() = 0;
  // Takes the order in which rank 0 got its gradients, as slots. Slots of which rank 0 had none are not in it.
  virtual void follow(const std::vector<size_t>& order) = 0;

  void add_slot(const std::string& name, const at::Tensor& parameter);
  void forget_slots();  // gradients stay in .grad; call it before a step
  bool next_is_ready() const;
  void post_next();
  [[noreturn]] void refuse_growth(const GradientSlot& slot) const;
  bool records() const;  // tells whether a CUDA graph records this step
  bool by_grains() const { return terms_.active(); }
  const std::string& name() const { return name_; }  // names this rank, and the object as the user calls it

  Rank rank_;
  const bool queues_calls_;

 private:
  const std::string name_;
  const Kind kind_;

 protected:
  bool uses_buckets_;  // false: a single rank's gradients stay where backward leaves them, and keep() runs it
  std::mutex mutex_;   // guards all below
  GradientSlots gradients_;
  std::vector<GradientSlot>& slots_ = gradients_.slots;
  std::vector<GradientSlots::Bucket>& buckets_ = gradients_.buckets;
  GrainTerms terms_;
  std::vector<size_t> order_;  // the order in which buckets are posted
  size_t next_ = 0;            // all buckets before this place in order_ are posted
  bool learnt_ = false;        // order_ follows rank 0's gradients; or a single rank's first gradients were looked at

 private:
  void average(const std::function<void()>& backward, const PartSizes& sizes);
  void on_gradient(size_t slot);  // the hook calls it
  void on_grain_gradient(size_t slot);
  void note_ready(size_t slot);
  void check_types() const;
  void start();
  void finish(const PartSizes& sizes);
  void keep(const std::function<void()>& backward, const PartSizes& sizes);
  void report(const PartSizes& sizes);
  void leave_unused_undefined(bool reported);
  void learn_order();
  void warn_of_unused();
  void give_up();

  BackwardReport report_;
  size_t turns_ = 0;  // the number of backwards in which a parameter was compared
  bool compares_ = true;
  UnaveragedGradients alone_;        // notes gradients of backwards outside since the last start()
  bool outside_ = false;             // a backward outside added to a gradient, since the last start()
  std::vector<size_t> ready_order_;  // the slots in the order in which this backward made them ready
  std::vector<size_t> followed_;     // slots in which rank 0 had a gradient; empty until it is learnt
  bool active_ = false;              // true between start() and finish(); outside, hooks only note
  bool listening_ = true;            // see listen()
  bool told_of_unused_ = false;
  int64_t backwards_ = 0;
  std::string backward_name_;  // the name of the present backward, equal on all ranks
  std::string failure_;        // the failure of an earlier backward; empty while all is well
};

}  // namespace lockstep
