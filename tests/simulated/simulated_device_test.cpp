// Labels: simulated
// The simulated device itself: it computes what the CPU computes, later than the host asks, and reports each mistake
// that is planted here.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/simulated_device.hpp"

#include <memory>
#include <string>
#include <vector>

namespace simulated_device_test {

namespace simulated = lockstep::simulated;
using simulated::Gate;
using simulated::marked;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;

const c10::Device device("cuda:1");

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA);
}

struct SmallNet : torch::nn::Module {
  Tensor forward(const Tensor& x) { return fc(torch::max_pool2d(torch::relu(norm(conv(x))), 2).flatten(1)); }
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(4));
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(4 * 13 * 13, 10));
};

std::vector<Tensor> trained(const c10::Device& where, bool adam) {
  torch::manual_seed(2);
  SmallNet net;
  net.to(where);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (adam) {
    optimizer = std::make_unique<torch::optim::AdamW>(net.parameters(), 1e-3);
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  const Tensor x = torch::randn({8, 1, 28, 28}).to(where), y = torch::arange(8).to(where);
  for (int step = 0; step < 5; ++step) {
    optimizer->zero_grad();
    torch::nn::functional::cross_entropy(net.forward(x), y).backward();
    optimizer->step();
  }
  std::vector<Tensor> weights;
  for (const auto& weight : net.parameters()) weights.push_back(weight.detach().cpu());
  return weights;
}

TEST(SimulatedDevice, TrainsANetAsTheCpuDoes) {
  for (const bool adam : {false, true}) {
    const auto expected = trained(torch::kCPU, adam), actual = trained(device, adam);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-4, 1e-5)) << (adam ? "AdamW, " : "SGD, ") << i;
    }
  }
}

TEST(SimulatedDevice, TheHostGoesOnUntilItAsksForAValue) {
  const Tensor x = torch::ones({1000}, device);
  guard().synchronizeDevice(device.index());
  Gate gate(guard().getStream(device));
  const int64_t waits = simulated::host_waits(), launches = simulated::launches();
  const Tensor y = (x + 1).sum();
  EXPECT_EQ(simulated::launches() - launches, 2);
  EXPECT_EQ(simulated::host_waits(), waits);
  EXPECT_FALSE(guard().queryStream(guard().getStream(device)));
  gate.open();
  EXPECT_EQ(y.item<float>(), 2000);
  EXPECT_EQ(simulated::host_waits() - waits, 1);
}

TEST(SimulatedDevice, CountsWaitsForEventsByWhetherTheDeviceHasMoreToDo) {
  const auto waits_for = [](int tasks_behind) {
    const Tensor x = torch::ones({10}, device);
    const c10::Event event = marked(guard().getStream(device));
    for (int i = 0; i < tasks_behind; ++i) x.add_(1);
    const int64_t all = simulated::host_waits(), late = simulated::late_waits();
    event.synchronize();
    return std::pair(simulated::host_waits() - all, simulated::late_waits() - late);
  };
  EXPECT_EQ(waits_for(0), (std::pair<int64_t, int64_t>(1, 0)));
  EXPECT_EQ(waits_for(1), (std::pair<int64_t, int64_t>(0, 1)));
}

using SimulatedDeviceDeathTest = testing::Test;

TEST(SimulatedDeviceDeathTest, AHostThatTouchesTheDevicesMemoryDies) {
  const Tensor x = torch::ones({1000}, device);
  EXPECT_EXIT(volatile float touched = *static_cast<const volatile float*>(x.const_data_ptr());
              static_cast<void>(touched), testing::KilledBySignal(SIGSEGV), "");
}

TEST(SimulatedDevice, HostTensorsDoNotGoWithDeviceTensors) {
  const Tensor x = torch::ones({4}, device);
  EXPECT_THROW(x + torch::ones({4}), c10::Error);
  EXPECT_THROW(x + torch::ones({4}, c10::Device("cuda:0")), c10::Error);
  EXPECT_EQ((x + torch::ones({})).sum().item<float>(), 8);  // a number
  EXPECT_EQ(x.index({torch::tensor({1, 2})}).sum().item<float>(), 2);
}

TEST(SimulatedDevice, RandomNumbersFollowFromTheSeed) {
  const auto drawn = [] {
    torch::manual_seed(3);
    const Tensor first = torch::rand({5}, device);
    return torch::stack({first, torch::rand({5}, device)}).cpu();
  };
  const Tensor once = drawn();
  EXPECT_TRUE(drawn().equal(once));
  EXPECT_FALSE(once[0].equal(once[1]));
}

// A stream reads what another writes: 2 if the reader waits, 0 if it comes too early.
float read_beside(bool waits) {
  const auto side = guard().getStreamFromGlobalPool(device);
  Tensor x = torch::zeros({1000}, device);
  guard().synchronizeDevice(device.index());
  Gate gate(guard().getStream(device));
  x.add_(1);
  const auto written = marked(guard().getStream(device));
  const c10::StreamGuard beside(side);
  if (waits) {
    written.block(side);
    gate.open();
  }
  x.record_stream(side);
  const float value = (x * 2)[0].item<float>();
  gate.open();
  guard().synchronizeDevice(device.index());
  return value;
}

TEST(SimulatedDevice, AMissingWaitIsReported) {
  EXPECT_EQ(read_beside(true), 2);
  EXPECT_THAT(simulated::take_reports(), IsEmpty());
  EXPECT_EQ(read_beside(false), 0);
  EXPECT_THAT(simulated::take_reports(), ElementsAre(HasSubstr("race: aten::mul")));
}

// Memory is freed that another stream is yet to read: 2 if that stream was recorded, or else what came later.
float read_after_free(bool records) {
  const auto side = guard().getStreamFromGlobalPool(device);
  guard().synchronizeDevice(device.index());
  Gate gate(side);
  Tensor x = torch::ones({1000}, device), y;
  const auto written = marked(guard().getStream(device));
  {
    const c10::StreamGuard beside(side);
    written.block(side);
    y = x * 2;
  }
  if (records) x.record_stream(side);
  x = Tensor();
  const Tensor other = torch::full({1000}, 7, device);
  guard().synchronizeStream(guard().getStream(device));
  gate.open();
  const c10::StreamGuard beside(side);
  return y[0].item<float>();
}

TEST(SimulatedDevice, AMissingRecordStreamIsReported) {
  EXPECT_EQ(read_after_free(true), 2);
  EXPECT_THAT(simulated::take_reports(), IsEmpty());
  EXPECT_NE(read_after_free(false), 2);
  EXPECT_THAT(simulated::take_reports(), ElementsAre(HasSubstr("recordStream is missing")));
}

TEST(SimulatedDevice, FreedMemoryIsNotANumber) {
  Tensor old = torch::ones({100}, device);
  const void* const place = old.const_data_ptr();
  old = Tensor();
  const Tensor next = torch::empty({100}, device);
  EXPECT_EQ(next.const_data_ptr(), place);
  EXPECT_TRUE(next.isnan().all().item<bool>());
}

}  // namespace simulated_device_test
