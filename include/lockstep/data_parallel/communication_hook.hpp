// CommunicationHook: how one bucket of DataParallel's gradients is averaged over the ranks, for sending less, or
// otherwise, than the plain allreduce does.
//
//   struct SignHook : lockstep::CommunicationHook {  // each rank's vote on the direction, a byte per value
//     lockstep::HookRound average(const lockstep::GradientBucket& bucket, lockstep::Rank& rank) override {
//       const at::Tensor votes = bucket.flat.sign().to(at::kChar);
//       const auto finish = [flat = bucket.flat, votes] { flat.copy_(votes.sign()); };
//       return {.work = lockstep::post_allreduce(rank, votes), .finish = finish};
//     }
//   };
//   lockstep::DataParallel net(MyNet(), rank, {.hook = std::make_shared<SignHook>()});
//
// Hooks that are there: HalfPrecisionHook (half_precision_hook.hpp), PowerSgdHook (power_sgd.hpp). Used by its rank's
// backward alone; what it costs is what it sends.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

// Gradients of one type that are averaged together.
struct GradientBucket {
  at::Tensor flat = {};  // one dimension: this rank's gradients, each times its part's weight; to become the average
  std::vector<std::string> names = {};     // of the parameters, as the module names them
  std::vector<at::Tensor> gradients = {};  // theirs: views into flat, with their shapes
};

// One exchange of a bucket with the other ranks, and what comes after it.
struct HookRound {
  c10::intrusive_ptr<c10d::Work> work = {};  // of a collective; null: there is nothing to wait for
  // Once it is complete, one of the two: the bucket's next round; or, after the last one, what makes flat the average.
  // Without either flat is the average then.
  std::function<HookRound()> next = {};
  std::function<void()> finish = {};
};

// Posts an allreduce of `tensor`, in place, on the rank's backend, as Rank::allreduce without its wait.
c10::intrusive_ptr<c10d::Work> post_allreduce(Rank& rank, at::Tensor tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM);

class CommunicationHook {
 public:
  virtual ~CommunicationHook() = default;

  // Begins to average `bucket`, which stays until the last round is finished, over `rank`'s group. Called once per
  // bucket and averaged backward, as soon as all of its gradients are there, while backward computes others; so it must
  // post and not wait. The mean is meant: gradients of an earlier backward may be among them, and so are zeros of an
  // empty part. All ranks must make the same calls for a bucket, the same number of rounds included; then all calls of
  // all buckets have one order on all ranks, whenever they complete: after a bucket's first round comes the next one of
  // each earlier bucket that has one. On a GPU all of this runs on one stream of the hook's own, which is behind the
  // gradients and before what follows backward. Which parameters share a bucket changes once, after the first backward:
  // what is remembered goes by their names.
  virtual HookRound average(const GradientBucket& bucket, Rank& rank) = 0;

 private:
  friend class Reducer;
  std::atomic<bool> taken_ = false;  // by a DataParallel: no two may share what is one rank's
};

}  // namespace lockstep
