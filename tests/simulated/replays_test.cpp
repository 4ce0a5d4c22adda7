// Labels: simulated
// Replays whose ranks exchange through NCCL within the graph, and what ends a rank's wait for another that fails or
// stops. c10d's watchdog does not see such calls, and without lockstep's own look each of these runs would hang.
#include <gmock/gmock.h>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/lockstep.hpp>

#include "simulated/nccl_program/replayed_sums.hpp"
#include "simulated/soon_ended.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace replays_test {

using namespace std::chrono_literals;
using lockstep::Devices;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::Rank;
using lockstep::ReplayedSums;
using lockstep::soon_ended;

const Devices own_gpus = lockstep::parse_devices("cuda:0,cuda:1"), one_gpu = lockstep::parse_devices("2xcuda:0");
constexpr int kSteps = ReplayedSums::kSomeSteps;

TEST(Replays, ExchangeWhatTheirBatchesHold) {
  for (const auto& devices : {own_gpus, one_gpu}) {
    lockstep::run(devices, [](Rank& rank) {
      ReplayedSums sums(rank);
      for (int step = 0; step < kSteps; ++step) {
        sums.step(static_cast<float>(step * (rank.index() + 1)));
        EXPECT_EQ(sums.sum(), 3 * step);
      }
    });
  }
}

TEST(Replays, EndWhenAnotherRankFails) {
  for (const auto& devices : {own_gpus, one_gpu}) {
    SCOPED_TRACE(lockstep::to_string(devices));
    int done = 0;
    lockstep::Caught caught;
    EXPECT_THAT(soon_ended(devices,
                           [&](Rank& rank) {
                             ReplayedSums sums(rank);
                             if (rank.index() == 1) {
                               sums.steps(kSteps);
                               throw std::runtime_error("no memory");
                             }
                             caught = error_of([&] {
                               while (sums.done() < 500) sums.step(1);
                             });
                             done = sums.done();
                             throw std::runtime_error("as told");
                           }),
                Fails(Error::user_code, {1}));
    EXPECT_THAT(caught, Fails(Error::user_code, {1}));
    EXPECT_LE(done, kSteps + static_cast<int>(lockstep::kReplaysAhead));
  }
}

// Rank 1 is alive, and makes no more steps. Rank 0 learns of the end where it waits, after few steps and after many.
TEST(Replays, EndWhenAnotherRankMakesNoMore) {
  for (const int more : {3, 500}) {
    SCOPED_TRACE(more);
    std::atomic<bool> ended = false;
    EXPECT_THAT(soon_ended(
                    own_gpus,
                    [&](Rank& rank) {
                      ReplayedSums sums(rank);
                      sums.steps(kSteps);
                      if (rank.index() == 1) {
                        for (int i = 0; i < 500 && !ended; ++i) std::this_thread::sleep_for(10ms);
                        return;
                      }
                      try {
                        sums.steps(more);
                        sums.sum();
                      } catch (...) {
                        ended = true;
                        throw;
                      }
                    },
                    /*timeout=*/500ms),
                Fails(Error::late));
  }
}

// An abort waits until no graph holds a kernel of its communicator, and throws at the timeout, on the run's own thread.
TEST(Replays, EndWhenAGraphThatSomebodyKeepsHoldsUpTheAbort) {
  std::vector<std::unique_ptr<lockstep::Graph>> kept(2);
  EXPECT_THAT(soon_ended(
                  own_gpus,
                  [&](Rank& rank) {
                    const c10::StreamGuard stream(lockstep::stream_beside(rank.device()));
                    std::vector<torch::Tensor> tensors{torch::ones({4}, torch::TensorOptions(rank.device()))};
                    rank.allreduce(tensors[0]);
                    auto& graph = kept[static_cast<size_t>(rank.index())] = lockstep::make_cuda_graph();
                    graph->record([&] { rank.backend().allreduce(tensors)->wait(); });
                    rank.barrier();
                    if (rank.index() == 1) throw std::runtime_error("no memory");
                    rank.barrier();
                  },
                  /*timeout=*/500ms),
              Fails(Error::user_code, {1}));
}

}  // namespace replays_test
