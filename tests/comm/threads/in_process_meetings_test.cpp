// Labels: concurrency
// lockstep's own backend: when calls meet, and what ranks are told when they cannot.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <atomic>
#include <chrono>
#include <thread>

namespace in_process_meetings_test {

using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::Rank;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using namespace std::chrono_literals;

TEST(InProcessMeetings, AReceiveFromAnyRankTakesTheMessageThatWasSentFirst) {
  std::atomic<int> sent = 0;
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    const int turn = rank.world_size() - 1 - rank.index();  // the last rank sends first
    while (sent < turn) std::this_thread::yield();
    Tensors tensor{torch::zeros(2)};
    if (rank.index() > 0) {
      const auto work = rank.backend().send(tensor, 0, 3);
      ++sent;
      work->wait();
      return;
    }
    for (int source = 3; source > 0; --source) {
      const auto work = rank.backend().recvAnysource(tensor, 3);
      work->wait();
      EXPECT_EQ(work->sourceRank(), source);
    }
  });
}

TEST(InProcessMeetings, AReceiveFromAnyRankThatNobodyCanAnswerIsAnError) {
  const auto receive = [](Rank& rank) {
    Tensors tensor{torch::zeros(2)};
    rank.backend().recvAnysource(tensor, 3)->wait();
  };
  EXPECT_THAT(error_of([&] {
                lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
                  if (rank.index() == 1) receive(rank);
                });
              }),
              Fails(Error::difference));
  EXPECT_THAT(error_of([&] {
                lockstep::run(lockstep::test_devices(2),
                              [&](Rank& rank) { rank.index() == 0 ? receive(rank) : rank.barrier(); });
              }),
              Fails(Error::difference));
  EXPECT_THAT(error_of([&] {
                lockstep::run(lockstep::test_devices(2),
                              [&](Rank& rank) {
                                if (rank.index() == 0) return receive(rank);
                                std::this_thread::sleep_for(400ms);
                              },
                              {.timeout = 100ms});
              }),
              Fails(Error::late, {1}));
}

TEST(InProcessMeetings, AsynchronousCallsCompleteInAnyOrderOfWaiting) {
  lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
    std::vector<Tensors> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 5; ++i) {
      tensors.push_back({torch::full({100}, double(rank.index() * 10 + i))});
      works.push_back(rank.backend().allreduce(tensors.back()));
    }
    for (int i = 4; i >= 0; --i) {
      if (rank.index() == 1) {
        while (!works[i]->isCompleted()) std::this_thread::yield();  // polling makes progress
        EXPECT_TRUE(works[i]->isSuccess());
      }
      works[i]->wait();
      EXPECT_TRUE(torch::equal(works[i]->result()[0], torch::full({100}, 30.0 + 3 * i)));
    }
  });
}

TEST(InProcessMeetings, ACallThatNobodyWaitsForAndTheOthersDoNotMakeIsAnError) {
  EXPECT_THAT(error_of([] {
                lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
                  Tensors tensor{torch::ones(2)};
                  if (rank.index() == 0) rank.backend().allreduce(tensor);
                });
              }),
              Fails(Error::difference, {1}));
  EXPECT_THAT(error_of([] {
                lockstep::run(lockstep::test_devices(3), [](Rank& rank) {
                  Tensors tensor{torch::ones(2)};
                  if (rank.index() == 2) rank.backend().send(tensor, 0, 7);
                });
              }),
              Fails(Error::difference, {0}));
}

TEST(InProcessMeetings, PollingEndsAsWaitingDoes) {
  const auto poll = [](Rank& rank) {
    Tensors tensor{torch::ones(2)};
    const auto work = rank.backend().allreduce(tensor);
    while (!work->isCompleted()) std::this_thread::yield();
    EXPECT_FALSE(work->isSuccess());
    std::rethrow_exception(work->exception());
  };
  EXPECT_THAT(error_of([&] {
                lockstep::run(lockstep::test_devices(2), [&](Rank& rank) { rank.index() == 0 ? poll(rank) : void(); });
              }),
              Fails(Error::difference, {1}));
  lockstep::RunOptions options;
  options.timeout = 100ms;
  EXPECT_THAT(error_of([&] {
                lockstep::run(
                    lockstep::test_devices(2),
                    [&](Rank& rank) { rank.index() == 0 ? poll(rank) : std::this_thread::sleep_for(500ms); }, options);
              }),
              Fails(Error::late, {1}));
}

TEST(InProcessMeetings, RanksThatGiveTheSameMemoryAreRefused) {
  const Tensor shared = torch::ones(10);
  EXPECT_THAT(error_of([&] { lockstep::run(lockstep::test_devices(3), [&](Rank& rank) { rank.allreduce(shared); }); }),
              Fails(Error::difference));
  EXPECT_THAT(error_of([&] {
                lockstep::run(lockstep::test_devices(2),
                              [&](Rank& rank) { rank.broadcast(shared.narrow(0, rank.index() * 4, 5)); });
              }),
              Fails(Error::difference));
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) { rank.allreduce(shared.narrow(0, rank.index() * 5, 5)); });
  EXPECT_TRUE(torch::equal(shared, torch::full({10}, 2.0)));
}

TEST(InProcessMeetings, RanksThatWaitForEachOtherAreToldSoBeforeTheTimeout) {
  const auto start = std::chrono::steady_clock::now();
  const auto text = error_of([] {
    lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
      Tensors tensor{torch::ones(2)};
      if (rank.index() == 0)
        rank.allreduce(tensor[0]);
      else
        rank.backend().recv(tensor, 0, 0)->wait();
    });
  });
  EXPECT_THAT(text, Fails(Error::difference));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

TEST(InProcessMeetings, ATimeoutSaysWhoWasMissingAndWhere) {
  lockstep::RunOptions options;
  options.timeout = 200ms;
  const auto text = error_of([&] {
    lockstep::run(
        lockstep::test_devices(3),
        [](Rank& rank) {
          if (rank.index() == 2) std::this_thread::sleep_for(600ms);
          rank.allreduce(torch::ones(2));
        },
        options);
  });
  EXPECT_THAT(text, Fails(Error::late, {2}));
}

TEST(InProcessMeetings, EveryCallTakesATimeoutOfItsOwn) {
  const auto timeout_of = [](const auto& call) {
    const auto start = std::chrono::steady_clock::now();
    const auto text = error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        if (rank.index() == 1) std::this_thread::sleep_for(400ms);
        call(rank);
      });
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    return text;
  };
  const auto expected = Fails(Error::late, {1});
  const auto short_timeout = [](auto options) {
    options.timeout = 100ms;
    return options;
  };
  EXPECT_THAT(timeout_of([&](Rank& rank) {
                Tensors tensor{torch::ones(2)};
                rank.backend().allreduce(tensor, short_timeout(c10d::AllreduceOptions()))->wait();
              }),
              expected);
  EXPECT_THAT(timeout_of([&](Rank& rank) {
                Tensors tensor{torch::ones(2)};
                rank.backend().broadcast(tensor, short_timeout(c10d::BroadcastOptions()))->wait();
              }),
              expected);
  EXPECT_THAT(timeout_of([&](Rank& rank) {
                Tensors tensor{torch::ones(2)};
                rank.backend().reduce(tensor, short_timeout(c10d::ReduceOptions()))->wait();
              }),
              expected);
  EXPECT_THAT(timeout_of([&](Rank& rank) {
                Tensor input = torch::ones(2), output = torch::zeros(4);
                rank.backend()._allgather_base(output, input, short_timeout(c10d::AllgatherOptions()))->wait();
              }),
              expected);
  EXPECT_THAT(timeout_of([&](Rank& rank) {
                Tensor input = torch::ones(4), output = torch::zeros(2);
                rank.backend()._reduce_scatter_base(output, input, short_timeout(c10d::ReduceScatterOptions()))->wait();
              }),
              expected);
  EXPECT_THAT(timeout_of([&](Rank& rank) {
                Tensors inputs{torch::ones(2), torch::ones(2)}, outputs{torch::zeros(2), torch::zeros(2)};
                rank.backend().alltoall(outputs, inputs, short_timeout(c10d::AllToAllOptions()))->wait();
              }),
              expected);
  EXPECT_THAT(timeout_of([&](Rank& rank) { rank.backend().barrier(short_timeout(c10d::BarrierOptions()))->wait(); }),
              expected);
}

}  // namespace in_process_meetings_test
