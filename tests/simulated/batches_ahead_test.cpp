// Labels: simulated
// Batches of data on the CPU come to a GPU one ahead: the next one's copy begins before the step, and the step does not
// wait for it.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>

#include "support/simulated_device.hpp"

#include <chrono>
#include <deque>
#include <thread>
#include <vector>

namespace batches_ahead_test {

namespace simulated = lockstep::simulated;
using torch::Tensor;

const c10::Device gpu("cuda:1");
constexpr int kPooledStreams = 64;  // streams of the device, from 1 on

// Three batches of four samples.
lockstep::Dataset samples() {
  const Tensor x = torch::arange(12, torch::kFloat);
  return {x.view({12, 1}), -x};
}

std::vector<float> values_of(const Tensor& tensor) {
  const Tensor here = tensor.cpu().flatten();
  return {here.data_ptr<float>(), here.data_ptr<float>() + here.numel()};
}

TEST(BatchesAhead, TheNextOnesCopyBeginsBeforeTheStep) {
  const auto all = lockstep::batches(samples(), {.size = 4}, {.device = gpu});
  std::vector<int64_t> launches{simulated::launches()};
  for (auto batch = all.begin(); batch != all.end(); ++batch) launches.push_back(simulated::launches());
  ASSERT_EQ(launches.size(), 4U);
  EXPECT_EQ(launches[1] - launches[0], 4);  // the first and the second
  EXPECT_EQ(launches[2] - launches[1], 2);  // the third
  EXPECT_EQ(launches[3] - launches[2], 0);
}

TEST(BatchesAhead, AStepDoesNotWaitForTheNextOnesCopy) {
  const auto all = lockstep::batches(samples(), {.size = 4, .shuffle = false}, {.device = gpu});
  auto batch = all.begin();
  std::deque<simulated::Gate> gates;  // in front of the third's copies, behind the second's
  for (int stream = 1; stream <= kPooledStreams; ++stream) gates.emplace_back(gpu.index(), stream);
  ++batch;
  const Tensor sum = batch->x.sum() + batch->y.sum();
  const c10::Event end = simulated::marked(c10::impl::VirtualGuardImpl(gpu.type()).getStream(gpu));
  for (int i = 0; i < 500 && !end.query(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(end.query());
  gates.clear();
  EXPECT_EQ(sum.item<float>(), 0);
  ++batch;
  EXPECT_THAT(values_of(batch->x), testing::ElementsAre(8, 9, 10, 11));
  EXPECT_THAT(values_of(batch->y), testing::ElementsAre(-8, -9, -10, -11));
}

TEST(BatchesAhead, SharesThatChangeAreThoseOfTheNextBatch) {
  auto all = lockstep::batches(samples(), {.size = 4, .shuffle = false}, {.index = 1, .count = 2, .device = gpu});
  auto batch = all.begin();
  EXPECT_THAT(values_of(batch->x), testing::ElementsAre(2, 3));
  all.set_shares({0.25, 0.75});
  ++batch;
  EXPECT_THAT(values_of(batch->x), testing::ElementsAre(5, 6, 7));
  EXPECT_THAT(values_of(batch->y), testing::ElementsAre(-5, -6, -7));
  ++batch;
  EXPECT_THAT(values_of(batch->x), testing::ElementsAre(9, 10, 11));
}

TEST(BatchesAhead, TargetsMayBeTheSamples) {
  Tensor x = samples().x;
  for (const auto& batch : lockstep::batches({x, x}, {.size = 4, .shuffle = false}, {.device = gpu})) {
    EXPECT_THAT(values_of(batch.y), testing::ElementsAreArray(values_of(batch.x)));
  }
}

}  // namespace batches_ahead_test
