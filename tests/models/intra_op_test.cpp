// in_parallel takes LibTorch's intra-op threads, and each number once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "models/intra_op.hpp"
#include "support/intra_op_threads.hpp"

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace lockstep {
namespace intra_op_test {

TEST(InParallel, TakesEachNumberOnce) {
  for (const int threads : {1, 2, 3}) {
    const IntraOpThreads set(threads);
    for (const int64_t count : {0, 1, 2, 3, 7, 100, 70000}) {
      std::vector<std::atomic<int>> taken(count);
      in_parallel(count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++taken.at(i);
      });
      for (const auto& times : taken) EXPECT_EQ(times, 1);
    }
  }
}

TEST(InParallel, TakesAsManyThreadsAsLibTorch) {
  const auto threads_of = [](int threads, int64_t count) {
    const IntraOpThreads set(threads);
    std::mutex mutex;
    std::set<std::thread::id> seen;
    in_parallel(count, [&](int64_t, int64_t) {
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
    return seen.size();
  };
  EXPECT_EQ(threads_of(1, 30), 1u);
  EXPECT_EQ(threads_of(3, 1), 1u);
  EXPECT_EQ(threads_of(3, 30), kHasIntraOpThreads ? 3u : 1u);
  EXPECT_EQ(threads_of(3, 3), kHasIntraOpThreads ? 3u : 1u);
}

TEST(InParallel, ThrowsWhatTheBodyThrows) {
  const IntraOpThreads set(3);
  EXPECT_THROW(in_parallel(9,
                           [](int64_t, int64_t end) {
                             if (end == 9) throw std::range_error("9");
                           }),
               std::range_error);
}

}  // namespace intra_op_test
}  // namespace lockstep
