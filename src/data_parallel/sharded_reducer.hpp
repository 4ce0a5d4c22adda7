// ShardedReducer: averages a replica's gradients over the ranks so that each rank gets a slice of them, bucket by
// bucket, while backward still computes others. A sharded net has it in place of the Reducer.
//
// A bucket's average is one reduce_scatter. A gradient moves into the bucket's flat memory as soon as it is there, so
// that .grad is undefined after a backward. From Sharded::gradients on that memory is freed once it is reduced. There a
// bucket is posted only when the one before is reduced. So at most two buckets are in memory, and those that have begun
// to fill. With Sharded::parameters a bucket is a unit of DividedParameters. A unit gets memory only when all posted
// ones are reduced. Backward has computed a layer's gradients meanwhile, and one bucket is in memory. Without overlap
// it waits for a bucket as soon as that is posted.
//
// The averages' bits do not depend on the order of the buckets: a parameter stays at its place in the bucket.
#pragma once

#include <lockstep/data_parallel/options.hpp>

#include "divided_parameters.hpp"
#include "gradient_buckets.hpp"
#include "sharded_parameters.hpp"

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class ShardedReducer final : public GradientBuckets {
 public:
  // `divided` are the parameters with Sharded::parameters, else null.
  ShardedReducer(const std::vector<ShardedBucket>& buckets, const Rank& rank, const DataParallelOptions& options,
                 std::shared_ptr<DividedParameters> divided = nullptr);

  // Gives this rank's slices of the averaged gradients, by their parameters' names, in the memory that an update uses.
  // Throws Error if nothing was averaged.
  std::vector<std::pair<std::string, at::Tensor>> slices();

  // From Sharded::gradients on whole gradients are not kept, ranks wait for each other within backward, and the
  // averages of a step's parts add up.
  bool divides_gradients() const { return !keeps_memory(); }

  // Throws the failure of a gather, if there was one. Its operator threw LibTorch's exception instead.
  void rethrow_failure() const;

  void zero_grad();

  // Gives the slices their gradients, for an update. Throws Error if nothing was averaged.
  void use();  // uses the averages up: the next backward begins anew

 private:
  struct Reduction {  // one bucket's reduction
    ShardedBucket parameters;
    at::Tensor gradient;                       // the gradient of its slice
    at::Tensor memory = {};                    // the memory of its gradients; kept with Sharded::state
    at::Tensor average = {};                   // the reduction under way puts the slice's average here
    bool adds = false;                         // the average is added to that of an earlier backward
    c10::intrusive_ptr<c10d::Work> work = {};  // null: nothing to wait for
    std::function<void()> finish = {};         // by grains, makes the average once the work is complete; else empty
  };
  // Afterwards each bucket's slice has the average of all gradients that were computed since zero_grad() or use().
  void begin(bool by_grains) override;
  void collect(size_t slot) override;
  void post(size_t bucket) override;
  void move_on(bool may_wait) override;
  void complete(bool partial) override;
  void abandon() override;
  void follow(const std::vector<size_t>& order) override;

  void check_averaged() const;
  at::Tensor gradient_of(size_t slot) const;  // gives its slice's average; undefined if no rank had one
  void take_memory(size_t bucket);
  void give_memory(size_t bucket);
  void complete_oldest();  // waits for the oldest bucket under way
  void complete_all();
  bool one_by_one() const { return divided_ && !options_.overlap; }
  bool keeps_memory() const { return options_.sharded == Sharded::state; }  // tells whether buckets keep their memory

  const DataParallelOptions options_;
  const std::shared_ptr<DividedParameters> divided_;
  std::vector<ShardedBucket::Place> places_;  // the slots' places
  std::vector<Reduction> reductions_;         // the buckets' reductions
  std::deque<size_t> open_;                   // the buckets under way
  bool averaged_ = false;                     // there are averages to use()
  bool of_grains_ = false;                    // the averages are of grains
};

}  // namespace lockstep
