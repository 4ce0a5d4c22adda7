// Labels: simulated
// Four waits that order device work, and one word to the allocator, are taken away one at a time. The simulated device
// must report each. CMake compiles copies of streams.cpp and reducer.cpp for this program, in which planted.hpp's lines
// can be left out.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/half_precision_hook.hpp>

#include "simulated/planted/planted.hpp"
#include "support/simulated_device.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace planted_mistakes_test {

using lockstep::DataParallel;
using lockstep::Devices;
using lockstep::Rank;
using planted = lockstep::planted::Mistake;
namespace nn = torch::nn;

// GPUs of their own, and one that ranks share.
std::vector<Devices> worlds() {
  const c10::Device first(c10::kCUDA, 0), second(c10::kCUDA, 1);
  return {{first, second}, {first, first}, {first, first, second}};
}

// Training whose gradients go through `hook`, for more steps than those whose checks wait for the GPU.
void train(Rank& rank, const std::shared_ptr<lockstep::CommunicationHook>& hook) {
  DataParallel net(nn::Linear(6, 5), rank, {.hook = hook});
  torch::optim::SGD sgd(net->parameters(), /*lr=*/0.1);
  for (int step = 0; step < 6; ++step) {
    sgd.zero_grad();
    const torch::Tensor x = torch::full({4, 6}, rank.index() + 1.0, rank.device());
    net.backward_through([&] { net->forward(x).sum().backward(); });
    sgd.step();
  }
}

void train_plainly(Rank& rank) {
  train(rank, nullptr);
}

void train_with_a_hook(Rank& rank) {
  train(rank, std::make_shared<lockstep::HalfPrecisionHook>(at::kBFloat16));
}

// A sum for which only rank 0 waits.
void drop_a_work_on(torch::Tensor values, Rank& rank) {
  std::vector<torch::Tensor> tensors{std::move(values)};
  auto work = rank.backend().allreduce(tensors, {});
  tensors.clear();
  if (rank.index() == 0) work->wait();
  work.reset();
  rank.barrier();
}

void drop_a_work(Rank& rank) {
  drop_a_work_on(torch::ones({40, 7}, rank.device()), rank);
}

// A tensor that lies otherwise in memory is packed, summed, and copied back.
void drop_a_packed_work(Rank& rank) {
  torch::Tensor transposed = torch::ones({40, 7}, rank.device()).t();
  drop_a_work_on(std::move(transposed), rank);
}

// Gives what the device reports with this mistake, in all worlds. The host's threads share one clock, so a race can
// stay hidden where they happen to wait for each other: a world that reports nothing is tried again.
std::vector<size_t> reports_with(planted mistake, const std::function<void(Rank&)>& body) {
  std::vector<size_t> reports;
  lockstep::planted::mistake = mistake;
  const int tries = mistake == lockstep::planted::none ? 1 : 10;
  for (const Devices& devices : worlds()) {
    reports.push_back(0);
    for (int i = 0; i < tries && reports.back() == 0; ++i) {
      try {
        lockstep::run(devices, body);
      } catch (const lockstep::Error&) {  // wrong values can be noticed
      }
      reports.back() = lockstep::simulated::take_reports().size();
    }
  }
  lockstep::planted::mistake = lockstep::planted::none;
  return reports;
}

using testing::Each;
using testing::Gt;

TEST(PlantedMistakes, WithoutOneNothingIsReported) {
  for (const auto& body : {train_plainly, train_with_a_hook, drop_a_work, drop_a_packed_work}) {
    EXPECT_THAT(reports_with(lockstep::planted::none, body), Each(0));
  }
}

TEST(PlantedMistakes, AnExchangeThatDoesNotWaitForTheRanks) {
  EXPECT_THAT(reports_with(lockstep::planted::no_ready_marks, train_plainly), Each(Gt(0)));
}

TEST(PlantedMistakes, RanksThatDoNotWaitForTheExchange) {
  EXPECT_THAT(reports_with(lockstep::planted::no_done_marks, train_plainly), Each(Gt(0)));
}

TEST(PlantedMistakes, AHookThatBeginsBeforeTheGradientsAreThere) {
  EXPECT_THAT(reports_with(lockstep::planted::hook_first, train_with_a_hook), Each(Gt(0)));
}

TEST(PlantedMistakes, AnUpdateThatBeginsBeforeTheHookHasEnded) {
  EXPECT_THAT(reports_with(lockstep::planted::hook_last, train_with_a_hook), Each(Gt(0)));
}

}  // namespace planted_mistakes_test
