// Labels: simulated
// Replays whose ranks exchange through NCCL within the graph, and what ends a rank's wait for another that fails or
// stops. c10d's watchdog does not see such calls, and without lockstep's own look each of these runs would hang.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/lockstep.hpp>

#include "devices/cuda_graph.hpp"
#include "ranks/rank_wait.hpp"
#include "support/error_of.hpp"
#include "trainer/graphed_step.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

namespace replays_test {

using namespace std::chrono_literals;
using lockstep::Batch;
using lockstep::Devices;
using lockstep::error_of;
using lockstep::GraphedStep;
using lockstep::Rank;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using torch::Tensor;

// Steps that add the ranks' batches. With a GPU each the exchange is in the graph, with one GPU behind it.
class Steps {
 public:
  explicit Steps(Rank& rank)
      : rank_(rank),
        stream_(c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(rank.device())),
        recorded_(rank.backend().getBackendName() == "nccl"),
        sum_(torch::zeros({4}, torch::TensorOptions(rank.device()))),
        graphed_(rank, lockstep::make_cuda_graph(), rank.world_size(), recorded_, [this](const Batch& batch) {
          sum_.copy_(batch.x[0]);
          if (recorded_) exchange();
        }) {}

  void step(float value) {
    const Batch batch{.x = torch::full({1, 4}, value, torch::TensorOptions(rank_.device())),
                      .y = torch::zeros({1}, torch::TensorOptions(rank_.device())),
                      .global_size = rank_.world_size()};
    const bool replayed = graphed_.replay(batch);
    if (!replayed) sum_.copy_(batch.x[0]);
    if (!replayed || !recorded_) exchange();
    ++done_;
  }

  float sum() {
    lockstep::synchronize(rank_);
    return sum_[0].item<float>();
  }

  int done() const { return done_; }

 private:
  void exchange() {
    std::vector<Tensor> tensors{sum_};
    rank_.backend().allreduce(tensors, {})->wait();
  }

  Rank rank_;
  const c10::StreamGuard stream_;
  const bool recorded_;
  Tensor sum_;
  GraphedStep graphed_;
  int done_ = 0;
};

const Devices own_gpus = lockstep::parse_devices("cuda:0,cuda:1"), one_gpu = lockstep::parse_devices("2xcuda:0");
constexpr int kSteps = 8;  // the first of them ordinary ones

std::string soon_ended(const Devices& devices, const std::function<void(Rank&)>& body,
                       std::chrono::milliseconds timeout = 60s) {
  const auto start = std::chrono::steady_clock::now();
  const std::string error = error_of([&] { lockstep::run(devices, body, {.timeout = timeout}); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 8s) << error;
  return error;
}

TEST(Replays, ExchangeWhatTheirBatchesHold) {
  for (const auto& devices : {own_gpus, one_gpu}) {
    lockstep::run(devices, [](Rank& rank) {
      Steps steps(rank);
      for (int step = 0; step < kSteps; ++step) {
        steps.step(static_cast<float>(step * (rank.index() + 1)));
        EXPECT_EQ(steps.sum(), 3 * step);
      }
    });
  }
}

TEST(Replays, EndWhenAnotherRankFails) {
  for (const auto& devices : {own_gpus, one_gpu}) {
    SCOPED_TRACE(lockstep::to_string(devices));
    int done = 0;
    std::string caught;
    EXPECT_THAT(soon_ended(devices,
                           [&](Rank& rank) {
                             Steps steps(rank);
                             if (rank.index() == 1) {
                               for (int step = 0; step < kSteps; ++step) steps.step(1);
                               throw std::runtime_error("no memory");
                             }
                             caught = error_of([&] {
                               while (steps.done() < 500) steps.step(1);
                             });
                             done = steps.done();
                             throw std::runtime_error("as told");
                           }),
                AllOf(StartsWith("rank 1 ("), HasSubstr("no memory")));
    EXPECT_THAT(caught, AllOf(HasSubstr("rank 0 ("), HasSubstr("rank 1 ("), HasSubstr("no memory")));
    EXPECT_LE(done, kSteps + static_cast<int>(lockstep::kReplaysAhead));
  }
}

// Rank 1 is alive, and makes no more steps. Rank 0 learns of it where it waits, after few steps and after many.
TEST(Replays, EndWhenAnotherRankMakesNoMore) {
  for (const int more : {3, 500}) {
    SCOPED_TRACE(more);
    std::atomic<bool> ended = false;
    EXPECT_THAT(soon_ended(
                    own_gpus,
                    [&](Rank& rank) {
                      Steps steps(rank);
                      for (int step = 0; step < kSteps; ++step) steps.step(1);
                      if (rank.index() == 1) {
                        for (int i = 0; i < 500 && !ended; ++i) std::this_thread::sleep_for(10ms);
                        return;
                      }
                      try {
                        for (int step = 0; step < more; ++step) steps.step(1);
                        steps.sum();
                      } catch (...) {
                        ended = true;
                        throw;
                      }
                    },
                    /*timeout=*/500ms),
                AllOf(StartsWith("rank 0 (cuda:0): waited 0.5 s for its GPU"), HasSubstr("RunOptions::timeout")));
  }
}

}  // namespace replays_test
