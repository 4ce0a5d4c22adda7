// Labels: concurrency 2x2 3x3 2x4
// lockstep's own backend: every collective on worlds of 1 to 5 ranks, with values that differ by rank.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

namespace in_process_test {

using c10d::ReduceOp;
using lockstep::Rank;
using lockstep::Refused;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

void expect_equal(const Tensor& actual, const Tensor& expected) {
  if (lockstep::on_real_gpus() && actual.is_floating_point()) {  // CUDA divides by multiplying with 1 / world
    EXPECT_TRUE(torch::allclose(actual.cpu(), expected.cpu(), 1e-6, 0)) << "actual\n" << actual;
    return;
  }
  EXPECT_TRUE(torch::equal(actual.cpu(), expected.cpu())) << "actual\n" << actual << "\nexpected\n" << expected;
}

// Gives rank `rank`'s values: no two ranks' are equal, and all are small enough for every type's sums and products.
Tensor value(int rank, c10::IntArrayRef shape, torch::Dtype type = torch::kFloat) {
  const int64_t count = c10::multiply_integers(shape);
  return ((torch::arange(count) + rank) % 3 + 1).view(shape).to(type);
}

Tensors values(int world, c10::IntArrayRef shape, torch::Dtype type = torch::kFloat) {
  Tensors all;
  for (int rank = 0; rank < world; ++rank) all.push_back(value(rank, shape, type));
  return all;
}

c10d::AllreduceOptions with(ReduceOp op) {
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  return options;
}

class InProcessWorlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, InProcessWorlds, testing::Values(1, 2, 3, 4, 5));

TEST_P(InProcessWorlds, AllreduceReducesOverAllRanks) {
  const int world = GetParam();
  const Tensor all = torch::stack(values(world, {2, 7}));
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    const auto reduced = [&](ReduceOp::RedOpType op) {
      const Tensor tensor = value(rank.index(), {2, 7}).to(rank.device());
      rank.allreduce(tensor, op);
      return tensor;
    };
    expect_equal(reduced(ReduceOp::SUM), all.sum(0));
    expect_equal(reduced(ReduceOp::AVG), all.sum(0) / world);
    expect_equal(reduced(ReduceOp::PRODUCT), all.prod(0));
    expect_equal(reduced(ReduceOp::MIN), all.amin(0));
    expect_equal(reduced(ReduceOp::MAX), all.amax(0));
  });
}

TEST_P(InProcessWorlds, AllreduceTakesRandomShapesAlsoEmptyAndNotContiguous) {
  const int world = GetParam();
  torch::manual_seed(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> shape;
    for (int64_t dim = torch::randint(0, 4, {}).item<int64_t>(); dim > 0; --dim)
      shape.push_back(torch::randint(0, 9, {}).item<int64_t>());
    const Tensor inputs = torch::randint(-100, 100,
                                         [&] {
                                           auto all = shape;
                                           all.insert(all.begin(), world);
                                           return all;
                                         }())
                              .to(torch::kDouble);
    const Tensor sum = inputs.sum(0);
    lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
      const Tensor mine = inputs[rank.index()].to(rank.device());
      const Tensor plain = mine.clone();
      rank.allreduce(plain);
      expect_equal(plain, sum);
      if (shape.size() < 2) return;
      const Tensor transposed = mine.transpose(0, 1).contiguous().transpose(0, 1);
      const Tensor every_second = mine.repeat_interleave(2, 0).slice(0, 0, std::nullopt, 2);
      for (const auto& strided : {transposed, every_second}) {
        rank.allreduce(strided);
        expect_equal(strided, sum);
      }
    });
  }
}

TEST_P(InProcessWorlds, AllreduceAddsInTheOrderOfTheRanks) {
  const int world = GetParam();
  Tensors inputs;
  for (int rank = 0; rank < world; ++rank) inputs.push_back(torch::rand({1000}) * std::pow(1000, rank % 3));
  Tensor expected = inputs[0].clone();
  for (int rank = 1; rank < world; ++rank) expected += inputs[rank];
  for (int repeat = 0; repeat < 5; ++repeat) {
    lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
      std::this_thread::sleep_for(
          std::chrono::microseconds((rank.index() * 7 + repeat * 3) % 5 * 200));  // whoever comes first
      const Tensor tensor = inputs[rank.index()].clone().to(rank.device());
      rank.allreduce(tensor);
      expect_equal(tensor, expected);  // bit for bit
    });
  }
}

TEST_P(InProcessWorlds, BroadcastCopiesTheRootsValues) {
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    for (int root = 0; root < world; ++root) {
      const Tensor tensor = value(rank.index(), {3, 5}).to(rank.device());
      rank.broadcast(tensor, root);
      expect_equal(tensor, value(root, {3, 5}));
      const Tensor strided = value(rank.index(), {5, 3}).to(rank.device()).t();
      rank.broadcast(strided, root);
      expect_equal(strided, value(root, {5, 3}).t());
    }
  });
}

TEST_P(InProcessWorlds, ReduceLeavesTheSumOnTheRootAlone) {
  const int world = GetParam();
  const Tensor sum = torch::stack(values(world, {4, 3})).sum(0);
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    for (int root = 0; root < world; ++root) {
      Tensors tensor{value(rank.index(), {4, 3}).to(rank.device())};
      c10d::ReduceOptions options;
      options.rootRank = root;
      rank.backend().reduce(tensor, options)->wait();
      expect_equal(tensor[0], rank.index() == root ? sum : value(rank.index(), {4, 3}));
    }
  });
}

TEST_P(InProcessWorlds, AllgatherCollectsEveryRanksTensor) {
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Tensors input{value(rank.index(), {2, 3}).to(rank.device())};
    std::vector<Tensors> outputs(1);
    for (int i = 0; i < world; ++i)
      outputs[0].push_back(i % 2 ? torch::zeros({3, 2}, rank.device()).t() : torch::zeros({2, 3}, rank.device()));
    rank.backend().allgather(outputs, input)->wait();
    for (int i = 0; i < world; ++i) expect_equal(outputs[0][i], value(i, {2, 3}));

    Tensor flat = torch::zeros({2 * world, 3}, rank.device());
    rank.backend()._allgather_base(flat, input[0])->wait();
    expect_equal(flat, torch::cat(values(world, {2, 3})));
  });
}

TEST_P(InProcessWorlds, ARanksAllgatherAndReduceScatterHaveARowForEachRank) {
  const int world = GetParam();
  for (const auto type : {torch::kFloat, torch::kInt64, torch::kUInt8}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {0}, {7}, {3, 5}}) {
      const Tensor on_host = torch::stack(values(world, shape, type));
      lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
        const Tensor all = on_host.to(rank.device());
        expect_equal(rank.allgather(all[rank.index()]), all);
        // Every rank gives the same rows, so the sum is `world` times as much.
        expect_equal(rank.reduce_scatter(all), (all[rank.index()] * world).to(type));
        if (shape.size() < 2) return;
        expect_equal(rank.allgather(all[rank.index()].t()), all.transpose(1, 2));
        expect_equal(rank.reduce_scatter(all.transpose(1, 2)), (all[rank.index()].t() * world).to(type));
      });
    }
  }
  EXPECT_THAT(lockstep::error_of([&] {
                lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
                  rank.reduce_scatter(torch::ones({world + 1, 2}, rank.device()));
                });
              }),
              Refused());
}

TEST_P(InProcessWorlds, ReduceScatterGivesEachRankItsPartOfTheSum) {
  const int world = GetParam();
  const Tensor sum = torch::stack(values(world, {world, 3})).sum(0);
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Tensor whole = value(rank.index(), {world, 3}).to(rank.device());
    std::vector<Tensors> inputs{whole.unbind(0)};
    Tensors output{torch::zeros({3}, rank.device())};
    rank.backend().reduce_scatter(output, inputs)->wait();
    expect_equal(output[0], sum[rank.index()]);

    Tensor part = torch::zeros({1, 3}, rank.device());
    rank.backend()._reduce_scatter_base(part, whole)->wait();
    expect_equal(part[0], sum[rank.index()]);
    expect_equal(whole, value(rank.index(), {world, 3}));  // inputs stay

    c10d::ReduceScatterOptions options;
    options.reduceOp = ReduceOp::AVG;
    Tensor in_place = whole[rank.index()];
    rank.backend()._reduce_scatter_base(in_place, whole, options)->wait();
    expect_equal(in_place, sum[rank.index()] / world);
  });
}

TEST_P(InProcessWorlds, AlltoallTransposesTheRanksTensors) {
  const int world = GetParam();
  const auto message = [](int from, int to) { return torch::full({from + 1, to + 1}, 10.0 * from + to); };
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Tensors inputs, outputs;
    for (int i = 0; i < world; ++i)
      inputs.push_back(message(rank.index(), i).to(rank.device())),
          outputs.push_back(torch::zeros({i + 1, rank.index() + 1}, rank.device()));
    rank.backend().alltoall(outputs, inputs)->wait();
    for (int i = 0; i < world; ++i) expect_equal(outputs[i], message(i, rank.index()));
  });
  // One tensor each, cut by sizes: rank r sends r + 1 rows to everybody.
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Tensor input = torch::full({world * (rank.index() + 1), 2}, rank.index(), rank.device());
    std::vector<int64_t> input_sizes(world, rank.index() + 1), output_sizes;
    Tensors expected;
    for (int i = 0; i < world; ++i) output_sizes.push_back(i + 1), expected.push_back(torch::full({i + 1, 2}, i));
    Tensor output = torch::zeros({world * (world + 1) / 2, 2}, torch::dtype(torch::kLong).device(rank.device()));
    rank.backend().alltoall_base(output, input, output_sizes, input_sizes)->wait();
    expect_equal(output, torch::cat(expected));
  });
}

// One rank waits and the others drop tensor and work. On a GPU the memory must stay until the exchange has read it.
TEST_P(InProcessWorlds, AWorkThatNobodyWaitsForKeepsItsMemory) {
  const int world = GetParam();
  const Tensor sum = torch::stack(values(world, {40, 7})).sum(0);
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    for (const bool packed : {false, true}) {
      Tensor tensor = value(rank.index(), {40, 7}).to(rank.device());
      if (packed) tensor = tensor.t().contiguous().t();
      Tensors tensors{tensor};
      tensor = Tensor();
      auto work = rank.backend().allreduce(tensors);
      if (rank.index() != 0) continue;
      work->wait();
      work.reset();  // the last owner of the others' tensors; nothing has waited for the exchange's stream yet
      expect_equal(tensors[0], sum);
    }
    rank.barrier();
  });
}

// Rank 0 does not wait for the call, so the tensor's memory goes back while other ranks' GPUs may still use it.
TEST_P(InProcessWorlds, ARunThatFailsGivesNoMemoryAwayThatACallStillUses) {
  const int world = GetParam();
  const auto failing = [&](Rank& rank) {
    Tensors tensor{torch::ones({1000}, rank.device())};
    const auto work = rank.backend().allreduce(tensor);
    if (rank.index() != 0) work->wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (rank.index() == 0) throw std::runtime_error("out of luck");
  };
  EXPECT_THAT(lockstep::error_of([&] { lockstep::run(lockstep::test_devices(world), failing); }),
              Fails(lockstep::Error::user_code, {0}));
}

TEST_P(InProcessWorlds, MessagesGoAroundTheRingInOrder) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "a rank sends itself nothing";
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    const int next = (rank.index() + 1) % world, previous = (rank.index() + world - 1) % world;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 3; ++i) {
      Tensors tensor{torch::full({4}, 10 * rank.index() + i, rank.device())};
      works.push_back(rank.backend().send(tensor, next, /*tag=*/7));
    }
    for (int i = 0; i < 3; ++i) {
      Tensors tensor{torch::zeros({2, 4}, torch::dtype(torch::kLong).device(rank.device())).select(0, 1)};
      rank.backend().recv(tensor, previous, 7)->wait();
      expect_equal(tensor[0], torch::full({4}, 10 * previous + i));
    }
    for (auto& work : works) work->wait();
  });
}

// Some messages are sent before the receive is posted, some after.
TEST_P(InProcessWorlds, AReceiveFromAnyRankTakesEveryMessageOnceInItsSendersOrder) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "a rank sends itself nothing";
  constexpr int kTag = 0x4000, kMessages = 5;
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    if (rank.index() != 0) {
      for (int i = 0; i < kMessages; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(i % 2));
        Tensors tensor{torch::full({2}, 10 * rank.index() + i, rank.device())};
        rank.backend().send(tensor, 0, kTag)->wait();
      }
      return;
    }
    std::vector<int> received(world, 0);
    for (int i = 0; i < kMessages * (world - 1); ++i) {
      Tensors tensor{torch::zeros(2, torch::dtype(torch::kLong).device(rank.device()))};
      const auto work = rank.backend().recvAnysource(tensor, kTag);
      work->wait();
      const int source = work->sourceRank();
      expect_equal(tensor[0], torch::full({2}, 10 * source + received.at(source)++));
    }
    EXPECT_EQ(received, [&] {
      std::vector<int> all(world, kMessages);
      all[0] = 0;
      return all;
    }());
  });
}

TEST_P(InProcessWorlds, BarrierHoldsBackUntilAllHaveCome) {
  const int world = GetParam();
  std::atomic<int> arrived = 0;
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    for (int round = 1; round <= 10; ++round) {
      std::this_thread::sleep_for(std::chrono::microseconds(rank.index() * 100));
      ++arrived;
      rank.barrier();
      EXPECT_GE(arrived, round * world);
      rank.barrier();
    }
  });
}

}  // namespace in_process_test
