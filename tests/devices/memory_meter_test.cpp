// Labels: concurrency
// MemoryMeter against tensors of known size.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "devices/memory_meter.hpp"

#include <memory>
#include <thread>

namespace memory_meter_test {

using lockstep::MemoryLedger;
using lockstep::MemoryMeter;
using torch::Tensor;

constexpr int64_t kMega = 1 << 20;

Tensor bytes(int64_t count) {
  return torch::empty({count}, torch::kByte);
}

TEST(MemoryMeterTest, CountsWhatLivesAndTheMostThatLived) {
  const MemoryMeter meter;
  EXPECT_EQ(meter.peak(), 0);
  const Tensor kept = bytes(kMega);
  bytes(3 * kMega);
  { const Tensor a = bytes(kMega), b = bytes(kMega); }
  EXPECT_EQ(meter.current(), kMega);
  EXPECT_EQ(meter.peak(), 4 * kMega);
}

TEST(MemoryMeterTest, ThePeakCanBeTakenAnew) {
  MemoryMeter meter;
  bytes(5 * kMega);
  meter.reset_peak();
  EXPECT_EQ(meter.peak(), 0);
  bytes(kMega);
  EXPECT_EQ(meter.peak(), kMega);
}

TEST(MemoryMeterTest, MemoryFromBeforeDoesNotCount) {
  Tensor before = bytes(4 * kMega);
  const MemoryMeter meter;
  before.reset();
  EXPECT_EQ(meter.current(), 0);
  const Tensor after = bytes(kMega);
  EXPECT_EQ(meter.current(), kMega);
}

TEST(MemoryMeterTest, OtherThreadsDoNotCount) {
  const MemoryMeter meter;
  Tensor theirs;
  std::thread([&] {
    const MemoryMeter their_meter;
    theirs = bytes(kMega);
    EXPECT_EQ(their_meter.current(), kMega);
  }).join();
  EXPECT_EQ(meter.peak(), 0);
}

TEST(MemoryMeterTest, WithOneLedgerAnotherThreadMayFree) {
  const auto ledger = std::make_shared<MemoryLedger>();
  const MemoryMeter meter(ledger);
  Tensor kept = bytes(kMega), freed = bytes(2 * kMega);
  std::thread([&] {
    const MemoryMeter their_meter(ledger);
    freed.reset();
    EXPECT_EQ(their_meter.current(), 0);
  }).join();
  EXPECT_EQ(meter.current(), kMega);
  std::thread([&] { kept.reset(); }).join();  // a thread without a meter
  EXPECT_EQ(meter.current(), kMega);
}

TEST(MemoryMeterTest, MetersNest) {
  const MemoryMeter outer;
  const Tensor kept = bytes(kMega);
  {
    const MemoryMeter inner;
    bytes(2 * kMega);
    EXPECT_EQ(inner.peak(), 2 * kMega);
  }
  EXPECT_EQ(outer.peak(), 3 * kMega);
  EXPECT_EQ(outer.current(), kMega);
}

// For y = tanh(tanh(x)), forward keeps two results of x's size. Backward needs more, and leaves x's gradient.
TEST(MemoryMeterTest, CountsWhatAutogradKeeps) {
  const Tensor x = torch::ones({kMega}, torch::kFloat).requires_grad_();
  MemoryMeter meter;
  Tensor y = torch::tanh(torch::tanh(x));
  const auto one = static_cast<int64_t>(x.nbytes());
  EXPECT_EQ(meter.current(), 2 * one);
  y.backward(torch::ones_like(y));
  y.reset();
  EXPECT_GE(meter.peak(), 4 * one);
  EXPECT_EQ(meter.current(), one);
}

}  // namespace memory_meter_test
