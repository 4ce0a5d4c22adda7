// Labels: simulated
// Ranks over NCCL (src/comm/processes/nccl.cpp), with a stand-in for NCCL on simulated GPUs: what they compute, and
// what happens to the others when one fails. NCCL itself would wait for ever in each of these cases.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/lockstep.hpp>

#include "support/error_of.hpp"
#include "support/simulated_device.hpp"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace nccl_test {

using namespace std::chrono_literals;
using lockstep::Devices;
using lockstep::error_of;
using lockstep::Rank;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;

Devices gpus(int count) {
  Devices devices;
  for (int index = 0; index < count; ++index) devices.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  return devices;
}

Tensor one_to(Rank& rank, int64_t count) {
  return torch::arange(1, count + 1, torch::TensorOptions(rank.device())).to(torch::kFloat) *
         static_cast<double>(rank.index() + 1);
}

// The error of a run in which something waits for what does not come, which ends soon all the same.
std::string soon_ended(int ranks, const std::function<void(Rank&)>& body, std::chrono::milliseconds timeout = 60s) {
  const auto start = std::chrono::steady_clock::now();
  const std::string error = error_of([&] { lockstep::run(gpus(ranks), body, {.timeout = timeout}); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 8s) << error;
  return error;
}

TEST(Nccl, CollectivesAndMessages) {
  lockstep::run(gpus(3), [](Rank& rank) {
    ASSERT_EQ(rank.backend().getBackendName(), "nccl");
    const Tensor base = torch::arange(1, 4).to(torch::kFloat);
    Tensor sum = one_to(rank, 3);
    rank.allreduce(sum);
    EXPECT_TRUE(sum.cpu().equal(base * 6)) << sum;
    Tensor largest = one_to(rank, 3);
    rank.allreduce(largest, c10d::ReduceOp::MAX);
    EXPECT_TRUE(largest.cpu().equal(base * 3)) << largest;
    Tensor sent = one_to(rank, 3);
    rank.broadcast(sent, /*root=*/1);
    EXPECT_TRUE(sent.cpu().equal(base * 2)) << sent;
    EXPECT_TRUE(rank.allgather(one_to(rank, 3)).cpu().equal(torch::stack({base, base * 2, base * 3})));
    const Tensor rows = torch::stack({one_to(rank, 2), one_to(rank, 2) * 10, one_to(rank, 2) * 100});
    const Tensor own = rank.reduce_scatter(rows).cpu();
    EXPECT_TRUE(own.equal(torch::tensor({6.0f, 12.0f}) * std::pow(10, rank.index()))) << own;
    const int next = (rank.index() + 1) % 3, before = (rank.index() + 2) % 3;
    std::vector<Tensor> out{one_to(rank, 2)}, in{torch::zeros({2}, torch::TensorOptions(rank.device()))};
    // Messages wait for each other in the order in which they are queued: not all ranks may send first.
    if (rank.index() == 0) rank.backend().send(out, next, 0)->wait();
    rank.backend().recv(in, before, 0)->wait();
    if (rank.index() != 0) rank.backend().send(out, next, 0)->wait();
    EXPECT_TRUE(in[0].cpu().equal(torch::tensor({1.0f, 2.0f}) * (before + 1))) << in[0];
    Rank pair = rank.group(rank.index() == 2 ? 1 : 0);
    Tensor of_pair = one_to(rank, 2);
    pair.allreduce(of_pair);
    EXPECT_EQ(of_pair.cpu()[0].item<float>(), 3);  // 1 + 2, and 3 alone
    rank.barrier();
  });
  EXPECT_THAT(lockstep::simulated::take_reports(), IsEmpty());
}

TEST(Nccl, ADataParallelStepIsThatOfOneDevice) {
  const Tensor x = torch::randn({6, 4}), y = torch::tensor({0, 1, 2, 0, 1, 2});
  torch::nn::Linear plain(4, 3);
  torch::nn::functional::cross_entropy(plain(x), y).backward();
  lockstep::run(gpus(2), [&](Rank& rank) {
    torch::nn::Linear copy(4, 3);
    {
      const torch::NoGradGuard no_grad;
      copy->weight.copy_(plain->weight);
      copy->bias.copy_(plain->bias);
    }
    lockstep::DataParallel net(copy, rank);
    for (const auto& batch : lockstep::batches({x, y}, {.size = 6, .shuffle = false}, rank)) {
      net.loss(batch, torch::nn::functional::cross_entropy).backward();
    }
    EXPECT_TRUE(copy->weight.grad().cpu().allclose(plain->weight.grad(), 1e-5, 1e-6));
  });
}

// ---- What ends the others.

TEST(NcclFailures, BeforeItsFirstCall) {
  EXPECT_THAT(soon_ended(3,
                         [](Rank& rank) {
                           if (rank.index() == 1) throw std::runtime_error("no memory");
                           Tensor sum = one_to(rank, 3);
                           rank.allreduce(sum);
                           sum.cpu();
                           rank.barrier();
                         }),
              AllOf(HasSubstr("rank 1 (cuda:1)"), HasSubstr("no memory")));
}

TEST(NcclFailures, BeforeItComesToAGroup) {
  EXPECT_THAT(soon_ended(3,
                         [](Rank& rank) {
                           if (rank.index() == 2) {
                             rank.allgather(torch::zeros({1}, torch::TensorOptions(rank.device()).dtype(torch::kLong)));
                             throw std::runtime_error("no memory");
                           }
                           rank.group(0);
                         }),
              AllOf(HasSubstr("rank 2 (cuda:2)"), HasSubstr("no memory")));
}

TEST(NcclFailures, WhileAnotherHasReturnedWithACallUnderWay) {
  std::atomic<bool> returns = false;
  std::vector<Tensor> kept;
  EXPECT_THAT(soon_ended(2,
                         [&](Rank& rank) {
                           if (rank.index() == 0) {
                             kept = {one_to(rank, 3)};
                             rank.backend().allreduce(kept, {});
                             returns = true;
                             return;
                           }
                           while (!returns) std::this_thread::sleep_for(1ms);
                           std::this_thread::sleep_for(100ms);
                           throw std::runtime_error("no memory");
                         }),
              AllOf(HasSubstr("rank 1 (cuda:1)"), HasSubstr("no memory")));
  kept.clear();
  lockstep::simulated::take_reports();  // nobody waits for the call; c10d's watchdog would keep its memory
}

TEST(NcclFailures, ACallThatARankDoesNotMake) {
  EXPECT_THAT(soon_ended(
                  2,
                  [&](Rank& rank) {
                    if (rank.index() == 1) {
                      std::this_thread::sleep_for(2s);
                      return;
                    }
                    Tensor sum = one_to(rank, 3);
                    rank.allreduce(sum);
                    sum.cpu();
                    rank.barrier();
                  },
                  /*timeout=*/500ms),
              AllOf(HasSubstr("rank 0 (cuda:0)"), HasSubstr("waited 0.5 s in a call of NCCL")));
  EXPECT_THAT(lockstep::simulated::take_reports(), IsEmpty());  // the watchdog spared the process
}

TEST(NcclFailures, EndTheNextCallOfARankThatGoesOn) {
  std::atomic<bool> failed = false;
  std::string caught;
  EXPECT_THAT(soon_ended(2,
                         [&](Rank& rank) {
                           rank.barrier();
                           if (rank.index() == 1) {
                             failed = true;
                             throw std::runtime_error("no memory");
                           }
                           while (!failed) std::this_thread::sleep_for(1ms);
                           std::this_thread::sleep_for(200ms);
                           caught = error_of([&] { rank.barrier(); });
                         }),
              HasSubstr("no memory"));
  EXPECT_THAT(caught, AllOf(HasSubstr("rank 0 (cuda:0)"), HasSubstr("rank 1 (cuda:1)"), HasSubstr("no memory")));
}

}  // namespace nccl_test
