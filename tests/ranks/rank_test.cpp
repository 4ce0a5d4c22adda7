// Labels: concurrency
// run(): threads, failures, what is left behind.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/ranks/traffic.hpp>

#include "support/group_tests.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

namespace rank_test {

using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Traffic;
using testing::HasSubstr;
using namespace std::chrono_literals;

size_t count_entries(const char* folder) {
  const std::filesystem::directory_iterator entries(folder);
  return std::distance(begin(entries), end(entries));
}

int64_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") break;
  }
  int64_t kib = 0;
  status >> kib;
  return kib;
}

TEST(Run, CallsTheBodyOncePerDeviceAllAtTheSameTime) {
  std::mutex mutex;
  std::set<int> indices;
  std::set<std::thread::id> threads;
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    EXPECT_EQ(rank.world_size(), 4);
    EXPECT_EQ(rank.device(), torch::Device(torch::kCPU));
    rank.barrier();  // passes only if all four run
    const std::lock_guard lock(mutex);
    indices.insert(rank.index());
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(indices, (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(threads.size(), 4u);
}

TEST(Run, GivesEachRankItsOwnThreadCount) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 3}) {
    lockstep::RunOptions options;
    options.threads_per_rank = threads;
    lockstep::run(
        lockstep::test_devices(2), [&](Rank&) { EXPECT_EQ(at::get_num_threads(), threads); }, options);
  }
  EXPECT_EQ(at::get_num_threads(), before);
}

TEST(Run, AWorldOfOneIsANormalWorld) {
  lockstep::run(lockstep::test_devices(1), [](Rank& rank) {
    const auto tensor = torch::full({3}, 5.0);
    rank.allreduce(tensor, c10d::ReduceOp::AVG);
    rank.broadcast(tensor);
    rank.barrier();
    EXPECT_TRUE(torch::equal(tensor, torch::full({3}, 5.0)));
  });
}

TEST(Run, RanksAgreeOnNumbersDecisionsAndTexts) {
  for (const int ranks : {1, 3}) {
    lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
      const int r = rank.index();
      EXPECT_EQ(rank.mean(r + 1.5), ranks == 1 ? 1.5 : 2.5);
      EXPECT_EQ(rank.mean(r, r + 1), ranks == 1 ? 0 : (1 * 2 + 2 * 3) / 6.0);
      EXPECT_EQ(rank.mean(r == 0 ? 4 : std::nan(""), r == 0 ? 2 : 0), 4);  // the others have no samples
      EXPECT_FALSE(rank.any(false));
      EXPECT_TRUE(rank.any(r == ranks - 1));
      const std::string text = "rank " + std::to_string(r) + std::string(static_cast<size_t>(r), '\0');
      EXPECT_EQ(rank.broadcast(text), "rank 0");
      if (ranks == 3) EXPECT_EQ(rank.broadcast(text, 2), std::string("rank 2\0\0", 8));
    });
  }
}

TEST(Run, GroupsOfARankThatIsWrappedTwiceAreToo) {
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    const auto inner = std::make_shared<lockstep::Traffic>(), outer = std::make_shared<lockstep::Traffic>();
    Rank group = Traffic::observed(Traffic::observed(rank, inner), outer).group(0);
    inner->sent = outer->sent = 0;
    group.allreduce(torch::ones(4));
    EXPECT_EQ(inner->sent, 16);
    EXPECT_EQ(outer->sent, 16);
  });
}

TEST(Run, AMeanNeedsWeights) {
  for (const double weight : {0.0, -1.0, std::numeric_limits<double>::infinity()}) {
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      const auto text = error_of([&] { rank.mean(1, weight == 0 || rank.index() == 1 ? weight : 1); });
      EXPECT_THAT(text, Refused());
    });
  }
}

// NCCL refuses memory in another order than a tensor's dimensions, and so does the counting backend.
TEST(Run, TensorsOfAnyStridesTravelInTheOrderOfTheirDimensions) {
  lockstep::run(lockstep::test_devices(3), [](Rank& rank) {
    using lockstep::CountingBackend;
    Rank strict = lockstep::counted(rank, std::make_shared<CountingBackend::Calls>());
    const torch::Tensor whole = torch::arange(12.0).view({3, 4});
    const auto transposed = [&](double factor) { return (whole * factor).t().contiguous().t(); };
    const torch::Tensor mine = transposed(rank.index() + 1);
    ASSERT_FALSE(mine.is_contiguous());
    const torch::Tensor all = strict.allgather(mine);
    for (int other = 0; other < 3; ++other) EXPECT_TRUE(all[other].equal(whole * (other + 1)));
    EXPECT_TRUE(strict.reduce_scatter(mine).equal(whole[rank.index()] * 6));
    const torch::Tensor told = transposed(rank.index() + 1);
    strict.broadcast(told, 2);
    EXPECT_TRUE(told.equal(whole * 3));
    strict.allreduce(mine);
    EXPECT_TRUE(mine.equal(whole * 6));
    EXPECT_FALSE(mine.is_contiguous());
  });
}

// The best of three: a machine may be busy.
TEST(Run, ARankThatThrowsEndsTheOthersWithinASecondWhereverTheyWait) {
  const auto took_if_it_fails = [](int failing) {
    std::atomic<int> ended = 0;
    const auto start = std::chrono::steady_clock::now();
    const auto text = error_of([&] {
      lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
        struct Count {
          std::atomic<int>& ended;
          ~Count() { ++ended; }
        } count{ended};
        if (rank.index() == failing) {
          std::this_thread::sleep_for(100ms);
          throw std::runtime_error("out of luck");
        }
        std::vector<torch::Tensor> tensor{torch::ones(2)};
        if (rank.index() == (failing + 1) % 3) rank.allreduce(tensor[0]);
        rank.backend().recv(tensor, failing, 0)->wait();
      });
    });
    EXPECT_THAT(text, Fails(Error::user_code, {failing}));
    EXPECT_EQ(ended, 3);
    return std::chrono::steady_clock::now() - start;
  };
  for (const int failing : {0, 1, 2}) {
    auto best = took_if_it_fails(failing);
    for (int i = 1; i < 3 && best >= 1100ms; ++i) best = std::min(best, took_if_it_fails(failing));
    EXPECT_LT(best, 1100ms) << "rank " << failing;
  }
}

TEST(Run, KeepsTheOriginalExceptionNested) {
  try {
    lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
      if (rank.index() == 1) throw std::out_of_range("too far");
      rank.barrier();
    });
    FAIL() << "nothing was thrown";
  } catch (const lockstep::Error& error) {
    EXPECT_EQ(error.cause(), Error::user_code);
    EXPECT_THAT(error.ranks(), testing::ElementsAre(1));
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
}

TEST(Run, ThrowsStoppedIfThatEndedARank) {
  const auto run = [](bool stop) {
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      if (rank.index() == 1 && stop) throw lockstep::Stopped("as the user wants");
      if (rank.index() == 1) throw lockstep::Error("stopped by request");  // in words alone
      rank.barrier();
    });
  };
  EXPECT_THROW(run(true), lockstep::Stopped);
  try {
    run(false);
    FAIL() << "nothing was thrown";
  } catch (const lockstep::Stopped&) {
    FAIL() << "by its text";
  } catch (const lockstep::Error& error) {
    EXPECT_EQ(error.cause(), Error::refused);
    EXPECT_THAT(error.ranks(), testing::ElementsAre(1));
  }
}

TEST(Run, NamesTheRankOfAnErrorFromLibTorch) {
  const auto text = error_of([] {
    lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
      if (rank.index() == 1) torch::ones({2, 3}).mm(torch::ones({2, 3}));
      rank.barrier();
    });
  });
  EXPECT_THAT(text, Fails(Error::user_code, {1}));
}

TEST(Run, NestsAndRepeats) {
  std::atomic<int> sum = 0;
  lockstep::run(lockstep::test_devices(2), [&](Rank& outer) {
    lockstep::run(lockstep::test_devices(3), [&](Rank& inner) {
      const auto tensor = torch::full({1}, double(10 * outer.index() + inner.index()));
      inner.allreduce(tensor);
      EXPECT_EQ(tensor.item<double>(), 30 * outer.index() + 3);
      sum += inner.index();
    });
    outer.barrier();
  });
  EXPECT_EQ(sum, 6);
}

TEST(Run, InTurnCallsRankAfterRankSoThatTheSeedAloneDecides) {
  std::vector<std::vector<double>> draws;
  for (int repeat = 0; repeat < 3; ++repeat) {
    torch::manual_seed(7);
    std::vector<double> mine(4);
    lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
      mine[rank.index()] = rank.in_turn([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(3 - rank.index()));
        return torch::rand({1}, torch::kDouble).item<double>();
      });
    });
    draws.push_back(mine);
  }
  torch::manual_seed(7);
  for (int rank = 0; rank < 4; ++rank) {
    const double expected = torch::rand({1}, torch::kDouble).item<double>();
    for (const auto& mine : draws) EXPECT_EQ(mine[rank], expected);
  }
}

TEST(Run, TheCallersModesCountInItsRanks) {
  const auto grads = [] {
    std::atomic<int> enabled = 0;
    lockstep::run({torch::kCPU, torch::kCPU}, [&](Rank&) { enabled += at::GradMode::is_enabled() ? 1 : 0; });
    return enabled.load();
  };
  EXPECT_EQ(grads(), 2);
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(grads(), 0);
}

TEST(Run, InTurnTakesWhatReturnsNothing) {
  std::vector<int> order;
  lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
    rank.in_turn([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3 - rank.index()));
      order.push_back(rank.index());
    });
  });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
}

TEST(Run, LeavesNoThreadFileOrMemoryBehind) {
  const auto once = [] {
    lockstep::run(lockstep::test_devices(3), [](Rank& rank) {
      const auto tensor = torch::ones({1 << 18});
      rank.allreduce(tensor);
    });
    error_of([] {
      lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
        if (rank.index() == 1) throw std::runtime_error("on purpose");
        rank.allreduce(torch::ones({1 << 18}));
      });
    });
  };
  for (int i = 0; i < 20; ++i) once();
  const auto threads = count_entries("/proc/self/task"), files = count_entries("/proc/self/fd");
  const auto memory = resident_kib();
  for (int i = 0; i < 100; ++i) once();
  EXPECT_EQ(count_entries("/proc/self/task"), threads);
  EXPECT_EQ(count_entries("/proc/self/fd"), files);
  // 100 rounds hold 1 MiB tensors some 500 times: a leak of one per round would be 100 MiB.
  EXPECT_LT(resident_kib() - memory, 50 * 1024);
}

// Rank 1's reader stands still at the second batch, until a warning was given and rank 0's wait is over. If it
// `leaves`, rank 1 takes the first batch alone, and waits for the thread that reads ahead. Gives the error and the
// warnings.
template <typename Failure>
std::pair<lockstep::Caught, std::string> of_a_standing_reader(int ahead, const std::stop_token& stop,
                                                              bool leaves = false) {
  std::string said;
  lockstep::Caught error;
  std::atomic<bool> stands = false, warned = false;
  const auto begin = std::chrono::steady_clock::now();
  try {
    lockstep::run(
        lockstep::Devices(2, torch::kCPU),
        [&](Rank& rank) {
          lockstep::Samples samples(8, [&](const std::vector<int64_t>& numbers) {
            if (rank.index() == 1 && numbers[0] >= 4) {
              stands = true;
              while (!warned && std::chrono::steady_clock::now() < begin + 10s) std::this_thread::sleep_for(10ms);
              std::this_thread::sleep_for(1s);
            }
            const auto count = static_cast<int64_t>(numbers.size());
            return lockstep::Dataset{torch::ones({count, 1}), torch::ones({count})};
          });
          if (ahead > 0) samples = samples.read_ahead(ahead);
          for (const lockstep::Batch& batch : lockstep::batches(samples, {.size = 4, .shuffle = false}, rank)) {
            rank.allreduce(batch.x.clone());
            if (!leaves || rank.index() == 0) continue;
            while (!stands) std::this_thread::sleep_for(1ms);
            return;
          }
        },
        {.timeout = 500ms, .stop = stop, .on_warning = [&](const std::string& warning) {
           said += warning;
           warned = true;
         }});
  } catch (const Failure& failure) {
    error = {failure.what(), failure.data()};
  }
  return {error, said};
}

TEST(Run, NamesAReaderThatStandsStillWhenTheTimeoutStrikes) {
  for (const int ahead : {0, 2}) {
    const auto [error, said] = of_a_standing_reader<lockstep::Error>(ahead, {});
    EXPECT_THAT(said, HasSubstr("rank 1 (cpu) has been in Samples::read (batch 1) for "));
    EXPECT_THAT(error, Fails(Error::late));
  }
  const auto [error, said] = of_a_standing_reader<lockstep::Error>(2, {}, /*leaves=*/true);
  EXPECT_THAT(said, HasSubstr("rank 1 (cpu) has been in Samples::read (ahead) for "));
  EXPECT_THAT(error, Fails(Error::late));
}

TEST(Run, AStopWhileAReaderStandsStillNamesItAndEndsAsAStop) {
  std::stop_source stop;
  stop.request_stop();
  const auto [error, said] = of_a_standing_reader<lockstep::Stopped>(0, stop.get_token());
  EXPECT_THAT(error, Fails(Error::stopped));
  EXPECT_THAT(said, HasSubstr("rank 1 (cpu) has been in Samples::read (batch 1) for "));
}

// A reader that stands still makes a stop of another rank's wait alone.
TEST(Run, AnErrorBesideAReaderThatStandsStillIsNoStop) {
  std::stop_source stop;
  stop.request_stop();
  std::atomic<bool> stands = false, ended = false;
  const lockstep::Samples slow(1, [&](const auto&) {
    stands = true;
    while (!ended) std::this_thread::sleep_for(10ms);
    return lockstep::Dataset{torch::ones({1, 1}), torch::ones({1})};
  });
  const auto run = [&] {
    lockstep::run(lockstep::Devices(2, torch::kCPU),
                  [&](Rank& rank) {
                    if (rank.index() == 1) lockstep::batches(slow, {.size = 1}).begin();
                    while (!stands) std::this_thread::sleep_for(10ms);
                    std::this_thread::sleep_for(600ms);
                    ended = true;
                    throw lockstep::Error("no such file");
                  },
                  {.timeout = 1s, .stop = stop.get_token(), .on_warning = [](const std::string&) {}});
  };
  try {
    run();
    FAIL();
  } catch (const lockstep::Stopped& stopped) {
    FAIL() << stopped.what();
  } catch (const lockstep::Error& error) {
    EXPECT_EQ(error.cause(), Error::refused);
  }
}

TEST(Run, RefusesBadInputBeforeAnyRankStarts) {
  const auto never = [](Rank&) { FAIL() << "a rank was started"; };
  EXPECT_THAT(error_of([&] { lockstep::run({}, never); }), Refused());
  EXPECT_THAT(error_of([&] { lockstep::run({torch::Device("cuda:99")}, never); }), Refused());
  EXPECT_THAT(error_of([&] { lockstep::run({torch::Device("cpu"), torch::Device("cuda:0")}, never); }), Refused());
  EXPECT_THAT(error_of([&] { lockstep::run(lockstep::test_devices(2), never, {.threads_per_rank = 0}); }),
              Refused("threads_per_rank"));
  EXPECT_THAT(error_of([&] { lockstep::run(lockstep::test_devices(2), never, {.timeout = 0ms}); }), Refused("timeout"));
  EXPECT_THAT(error_of([&] { lockstep::run(lockstep::test_devices(2), never, {.silence = 999ms}); }),
              Refused("silence"));
}

}  // namespace rank_test
