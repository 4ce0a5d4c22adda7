// Labels: simulated
// Ranks over NCCL (src/comm/processes/nccl.cpp), with a stand-in for NCCL on simulated GPUs: what they compute, and
// what happens to the others when one fails. NCCL itself would wait for ever in most of the failures.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/lockstep.hpp>

#include "simulated/nccl_program/collectives.hpp"
#include "simulated/soon_ended.hpp"
#include "support/error_of.hpp"
#include "support/simulated_device.hpp"
#include "support/test_devices.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

namespace nccl_test {

using namespace std::chrono_literals;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::gpus;
using lockstep::one_to;
using lockstep::Rank;
using lockstep::soon_ended;
using testing::IsEmpty;
using torch::Tensor;

TEST(Nccl, MakesEveryCall) {
  lockstep::run(gpus(3), [](Rank& rank) {
    ASSERT_EQ(rank.backend().getBackendName(), "nccl");
    lockstep::make_every_call(rank);
  });
  EXPECT_THAT(lockstep::simulated::take_reports(), IsEmpty());
}

TEST(Nccl, AGroupOfOneNeedsNoCommunicator) {
  lockstep::run(gpus(3), [](Rank& rank) {
    Rank pair = rank.group(rank.index() == 2 ? 1 : 0);
    EXPECT_EQ(pair.backend().getBackendName(), rank.index() == 2 ? "lockstep" : "nccl");
    EXPECT_EQ(pair.name(), rank.name());
  });
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

// NCCL adds memory as it lies, and c10d refuses some memory: what is in another order travels as a copy.
TEST(Nccl, TakesTensorsWhoseMemoryIsInAnotherOrder) {
  const Tensor values = torch::arange(48, torch::kFloat).view({2, 3, 4, 2});
  const auto in_channels_last = [](const Tensor& x) { return x.contiguous(torch::MemoryFormat::ChannelsLast); };
  const auto transposed = [](const Tensor& x) { return x.transpose(1, 2).contiguous().transpose(1, 2); };
  lockstep::run(gpus(2), [&](Rank& rank) {
    for (const auto& in_another_order :
         std::vector<std::function<Tensor(const Tensor&)>>{in_channels_last, transposed}) {
      const auto mine = [&] {
        const Tensor x = (values + rank.index()).to(rank.device());
        return rank.index() == 0 ? x : in_another_order(x);
      };
      const Tensor sum = mine(), sent = mine(), sent_back = mine();
      rank.allreduce(sum);
      lockstep::expect_values(sum, values * 2 + 1, "allreduce");
      rank.broadcast(sent, /*root=*/0);
      lockstep::expect_values(sent, values, "broadcast to it");
      rank.broadcast(sent_back, /*root=*/1);
      lockstep::expect_values(sent_back, values + 1, "broadcast from it");
      lockstep::expect_values(rank.allgather(mine()), torch::stack({values, values + 1}), "allgather");
      lockstep::expect_values(rank.reduce_scatter(mine()), (values * 2 + 1)[rank.index()], "reduce_scatter");
    }
  });
}

// NCCL reads the variable at its first communicator.
TEST(Nccl, RunsTheKernelsOfSeveralGroupsInTheOrderOfTheCalls) {
  lockstep::run(gpus(2), [](Rank& rank) { rank.barrier(); });
  EXPECT_STREQ(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT"), "1");
}

TEST(Nccl, HasStreamsOfHighPriority) {
  const int64_t before = lockstep::simulated::high_priority_launches();
  lockstep::run(gpus(2), [](Rank& rank) { rank.allreduce(one_to(rank, 3)); });
  EXPECT_GE(lockstep::simulated::high_priority_launches() - before, 2);  // one launch of each rank
}

// An elastic job's next generation has the same memory. The first layers' gradients come last: the others' bucket is
// under way then.
TEST(Nccl, WhatABackwardThatFailedFreesIsNoLongerInUse) {
  for (const int64_t grain : {0, 1}) {
    const auto error = error_of([&] {
      lockstep::run(gpus(2), [&](Rank& rank) {
        torch::nn::Sequential layers(torch::nn::Linear(4, 64), torch::nn::Linear(64, 64), torch::nn::Linear(64, 3));
        const Tensor first = layers->parameters()[0];
        lockstep::DataParallel net(layers, rank, {.bucket_bytes = 64, .first_bucket_bytes = 64});
        const Tensor x = torch::ones({8, 4}), y = torch::zeros({8}, torch::kLong);
        for (const auto& batch : lockstep::batches({x, y}, {.size = 8, .shuffle = false, .grain = grain}, rank)) {
          int left = grain == 0 ? 1 : 4;  // the last of this rank's grains has the others' gradients averaged
          first.register_hook([&](const Tensor&) {
            if (--left == 0 && rank.index() == 0) throw std::runtime_error("the hook failed");
          });
          net.loss(batch, torch::nn::functional::cross_entropy).backward();
        }
      });
    });
    EXPECT_THAT(error, Fails(Error::user_code, {0}));
    EXPECT_THAT(lockstep::simulated::take_reports(), IsEmpty()) << "grain " << grain;
  }
}

// ---- What ends the others.

TEST(NcclFailures, BeforeItsFirstCall) {
  EXPECT_THAT(soon_ended(gpus(3),
                         [](Rank& rank) {
                           if (rank.index() == 1) throw std::runtime_error("no memory");
                           Tensor sum = one_to(rank, 3);
                           rank.allreduce(sum);
                           sum.cpu();
                           rank.barrier();
                         }),
              Fails(Error::user_code, {1}));
}

TEST(NcclFailures, BeforeItComesToAGroup) {
  EXPECT_THAT(soon_ended(gpus(3),
                         [](Rank& rank) {
                           if (rank.index() == 2) {
                             rank.allgather(torch::zeros({1}, torch::TensorOptions(rank.device()).dtype(torch::kLong)));
                             throw std::runtime_error("no memory");
                           }
                           rank.group(0);
                         }),
              Fails(Error::user_code, {2}));
}

TEST(NcclFailures, WhileAnotherHasReturnedWithACallUnderWay) {
  std::atomic<bool> returns = false;
  std::vector<Tensor> kept;
  EXPECT_THAT(soon_ended(gpus(2),
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
              Fails(Error::user_code, {1}));
  kept.clear();
  lockstep::simulated::take_reports();  // nobody waits for the call; c10d's watchdog would keep its memory
}

TEST(NcclFailures, ACallThatARankDoesNotMake) {
  const auto late = soon_ended(
      gpus(2),
      [&](Rank& rank) {
        if (rank.index() == 1) return std::this_thread::sleep_for(2s);
        Tensor sum = one_to(rank, 3);
        rank.allreduce(sum);
        sum.cpu();
        rank.barrier();
      },
      /*timeout=*/500ms);
  EXPECT_THAT(late, Fails(Error::late));
  EXPECT_THAT(
      late, testing::HasSubstr(". Last calls: rank 0: allreduce(sum) of float [3] (collective call 0); rank 1: none"));
  EXPECT_THAT(lockstep::simulated::take_reports(), IsEmpty());  // the watchdog spared the process
}

TEST(NcclFailures, EndTheNextCallOfARankThatGoesOn) {
  std::atomic<bool> passed = false, failed = false;
  lockstep::Caught caught;
  EXPECT_THAT(soon_ended(gpus(2),
                         [&](Rank& rank) {
                           rank.barrier();
                           if (rank.index() == 1) {
                             while (!passed) std::this_thread::sleep_for(1ms);
                             failed = true;
                             throw std::runtime_error("no memory");
                           }
                           passed = true;
                           while (!failed) std::this_thread::sleep_for(1ms);
                           std::this_thread::sleep_for(200ms);
                           caught = error_of([&] { rank.barrier(); });
                         }),
              Fails(Error::user_code, {1}));
  EXPECT_THAT(caught, Fails(Error::user_code, {1}));
}

TEST(NcclFailures, EndABarrierWithAnErrorThatAnAbortEnds) {
  lockstep::Caught caught;
  soon_ended(gpus(2), [&](Rank& rank) {
    rank.barrier();
    if (rank.index() == 1) {
      std::this_thread::sleep_for(200ms);
      throw std::runtime_error("no memory");
    }
    caught = error_of([&] { rank.barrier(); });
  });
  EXPECT_THAT(caught, Fails(Error::user_code, {1}));
}

TEST(NcclFailures, EndABarrierWithAnErrorThatComesToItsTimeout) {
  lockstep::Caught caught;
  soon_ended(
      gpus(2),
      [&](Rank& rank) {
        rank.barrier();
        if (rank.index() == 1) return std::this_thread::sleep_for(2s);
        caught = error_of([&] { rank.barrier(); });
      },
      /*timeout=*/500ms);
  EXPECT_THAT(caught, Fails(Error::late));
}

// ---- Calls that a rank makes alone.

TEST(NcclFailures, AReturnWithoutTheOthersCallIsNoticedSoon) {
  EXPECT_THAT(soon_ended(gpus(3),
                         [](Rank& rank) {
                           rank.barrier();
                           if (rank.index() == 1) return;
                           rank.allreduce(one_to(rank, 3));
                           rank.barrier();
                         }),
              Fails(Error::difference));
}

TEST(NcclFailures, AReturnWithoutTheMessageOfAnotherIsNoticedSoon) {
  EXPECT_THAT(soon_ended(gpus(2),
                         [](Rank& rank) {
                           if (rank.index() == 1) return;
                           std::vector<Tensor> tensor{one_to(rank, 3)};
                           rank.backend().recv(tensor, 1, 0)->wait();
                           tensor[0].cpu();
                           rank.barrier();
                         }),
              Fails(Error::difference));
}

TEST(NcclFailures, CallsThatDifferAreFoundAtTheEnd) {
  EXPECT_THAT(soon_ended(gpus(2),
                         [](Rank& rank) {
                           const Tensor tensor = one_to(rank, 3);
                           if (rank.index() == 0) {
                             rank.allreduce(tensor);
                           } else {
                             rank.allreduce(tensor, c10d::ReduceOp::MAX);
                           }
                           tensor.cpu();  // the calls have met before a rank returns
                         }),
              Fails(Error::difference));
  EXPECT_THAT(lockstep::simulated::take_reports(), testing::Not(IsEmpty()));  // NCCL would add up what it finds
}

}  // namespace nccl_test
