// Labels: concurrency
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/scratch/on_each_device.hpp>

#include <atomic>
#include <barrier>
#include <mutex>
#include <new>
#include <set>
#include <thread>

#include "support/error_of.hpp"

namespace lockstep {
namespace on_each_device_test {

const c10::Device cpu(c10::kCPU);

TEST(OnEachDevice, CallsEveryIndexOnceOnAThreadOfItsOwn) {
  for (int count = 0; count <= 5; ++count) {
    std::mutex mutex;
    std::multiset<size_t> indices;
    std::set<std::thread::id> threads{std::this_thread::get_id()};
    on_each_device(Devices(count, cpu), [&](size_t i) {
      const std::lock_guard lock(mutex);
      indices.insert(i);
      threads.insert(std::this_thread::get_id());
    });
    std::multiset<size_t> expected;
    for (int i = 0; i < count; ++i) expected.insert(i);
    EXPECT_EQ(indices, expected);
    if (count > 0) EXPECT_EQ(threads.count(std::this_thread::get_id()), 1u);
    EXPECT_GE(threads.size(), count > 0 ? 2u : 1u);
  }
}

TEST(OnEachDevice, RunsAllAtTheSameTime) {
  std::barrier<> all_here(4);  // a worker that waited for another to end would hang here
  on_each_device(Devices(4, cpu), [&](size_t) { all_here.arrive_and_wait(); });
}

TEST(OnEachDevice, GivesWorkersOneIntraOpThreadAndLeavesTheCallersAlone) {
  at::set_num_threads(3);
  std::atomic<int> sum = 0;
  on_each_device(Devices(2, cpu), [&](size_t) { sum += at::get_num_threads(); });
  EXPECT_EQ(sum, 2);
  EXPECT_EQ(at::get_num_threads(), 3);
  int in_new_thread = 0;
  std::thread([&] { in_new_thread = at::get_num_threads(); }).join();
  EXPECT_EQ(in_new_thread, 3);
}

TEST(OnEachDevice, CarriesTheCallersGradModeIntoTheWorkers) {
  const auto workers_with_grad = [] {
    std::atomic<int> count = 0;
    on_each_device(Devices(3, cpu), [&](size_t) { count += torch::GradMode::is_enabled(); });
    return count.load();
  };
  EXPECT_EQ(workers_with_grad(), 3);
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(workers_with_grad(), 0);
}

TEST(OnEachDevice, RunsForwardAndBackwardOnAllAtOnce) {
  std::vector<torch::Tensor> weights;
  for (int i = 0; i < 4; ++i) weights.push_back(torch::full({2}, i + 1.0).requires_grad_());
  on_each_device(Devices(4, cpu), [&](size_t i) { (weights[i] * weights[i]).sum().backward(); });
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(weights[i].grad().equal(torch::full({2}, 2 * (i + 1.0))));
}

TEST(OnEachDevice, Nests) {
  std::atomic<int> sum = 0;
  on_each_device(Devices(3, cpu), [&](size_t i) {
    on_each_device(Devices(2, cpu), [&](size_t j) { sum += static_cast<int>(10 * i + j); });
  });
  EXPECT_EQ(sum, 2 * (0 + 10 + 20) + 3 * (0 + 1));
}

TEST(OnEachDevice, RethrowsTheLowestIndexAfterAllHaveEnded) {
  std::atomic<int> ended = 0;
  std::barrier<> all_here(4);
  const auto error = error_of([&] {
    on_each_device(Devices(4, cpu), [&](size_t i) {
      all_here.arrive_and_wait();
      if (i == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++ended;
      if (i == 1 || i == 3) throw Error("lost", {Error::user_code, {static_cast<int>(i)}});
    });
  });
  EXPECT_THAT(error, Fails(Error::user_code, {1}));
  EXPECT_EQ(ended, 4);
}

TEST(OnEachDevice, NestsTheOriginalException) {
  try {
    on_each_device({cpu}, [](size_t) { throw std::bad_alloc(); });
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.cause(), Error::machine);
    EXPECT_THROW(std::rethrow_if_nested(error), std::bad_alloc);
  }
}

TEST(OnEachDevice, NamesTheFailureOfLibTorchWithoutItsBacktrace) {
  const auto error =
      error_of([] { on_each_device(Devices(2, cpu), [](size_t) { torch::zeros({2}).add(torch::zeros({3})); }); });
  EXPECT_THAT(error, Fails(Error::user_code));
}

TEST(OnEachDevice, SurvivesAnExceptionOfUnknownType) {
  EXPECT_THAT(error_of([] { on_each_device({cpu}, [](size_t) { throw 42; }); }), Fails(Error::user_code));
}

TEST(OnEachDevice, RefusesADeviceThatIsNotThereBeforeAnyWork) {
  if (lockstep::gpus().size() > 7) GTEST_SKIP() << "this machine has the GPU that the test wants to miss";
  bool called = false;
  const auto error = error_of([&] { on_each_device({cpu, c10::Device("cuda:7")}, [&](size_t) { called = true; }); });
  EXPECT_THAT(error, Refused());
  EXPECT_FALSE(called);
}

}  // namespace on_each_device_test
}  // namespace lockstep
