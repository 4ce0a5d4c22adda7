// CommunicationHook: averages one bucket of DataParallel's gradients over the ranks in a way of its own, for example
// with fewer bytes than an allreduce.
//
//   struct SignHook : lockstep::CommunicationHook {  // each rank's vote on the direction, a byte per value
//     Round average(const lockstep::GradientBucket& bucket, lockstep::Rank& rank) override {
//       const at::Tensor votes = bucket.flat.sign().to(at::kChar);
//       const auto finish = [flat = bucket.flat, votes] { flat.copy_(votes.sign()); };
//       return {.work = post_allreduce(rank, votes), .finish = finish};
//     }
//   };
//   lockstep::DataParallel net(MyNet(), rank, {.hook = std::make_shared<SignHook>()});
//
// lab.hpp has two hooks: HalfPrecisionHook and PowerSgdHook. Only its rank's backward uses a hook. Cost: the bytes that
// it sends.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// Holds gradients of one type that are averaged together.
struct GradientBucket {
  at::Tensor flat = {};  // one dimension: this rank's gradients, each times its part's weight; becomes the average
  std::vector<std::string> names = {};     // the parameters' names in the module
  std::vector<at::Tensor> gradients = {};  // views into flat, with the parameters' shapes
};

class CommunicationHook {
 public:
  // A Round is one exchange of a bucket with the other ranks, and says what follows.
  struct Round {
    c10::intrusive_ptr<c10d::Work> work = {};  // the collective to wait for; null: none
    // When `work` is complete, one of these two is called. `next` begins the bucket's next round. `finish`, after the
    // last round, makes flat the average. If both are empty, flat is the average already.
    std::function<Round()> next = {};
    std::function<void()> finish = {};
  };

  virtual ~CommunicationHook() = default;

  // Begins to average `bucket` over `rank`'s group. It is called once per bucket in each averaged backward, as soon as
  // all of the bucket's gradients are there. Post, and do not wait: backward still computes others. The bucket lives
  // until its last round is finished. Make the result the mean: the values may include gradients of an earlier
  // backward, and zeros of an empty part.
  //
  // Make the same calls for a bucket on all ranks, in the same number of rounds. Then all calls have one order on all
  // ranks, whenever they complete: after a bucket's first round comes the next round of each earlier bucket that has
  // one. On a GPU all calls run on a stream of the hook's own, behind the gradients and before what follows backward.
  // After the first backward parameters move to other buckets, once. So remember things by the parameters' names.
  virtual Round average(const GradientBucket& bucket, Rank& rank) = 0;

  // Posts an allreduce of `tensor`, in place, on the rank's backend. Unlike Rank::allreduce it does not wait.
  static c10::intrusive_ptr<c10d::Work> post_allreduce(Rank& rank, at::Tensor tensor,
                                                       c10d::ReduceOp op = c10d::ReduceOp::SUM);

 private:
  friend class Reducer;
  std::atomic<bool> taken_ = false;  // a DataParallel uses it; no two may share a hook
};

using HookRound [[deprecated("lockstep::CommunicationHook::Round")]] = CommunicationHook::Round;
[[deprecated("lockstep::CommunicationHook::post_allreduce")]] inline c10::intrusive_ptr<c10d::Work> post_allreduce(
    Rank& rank, at::Tensor tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  return CommunicationHook::post_allreduce(rank, std::move(tensor), std::move(op));
}

}  // namespace lockstep
