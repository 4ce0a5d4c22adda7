// Labels: 3x3
// check_replicas: a replica that has become another one is found, whatever changed it, and named on all ranks.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "data_parallel/replica_check.hpp"
#include "support/group_tests.hpp"

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace check_replicas_test {

using namespace lockstep;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

class CheckReplicasWorlds : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, CheckReplicasWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

struct NetImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(6, 5));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(5));
  nn::Linear last = register_module("last", nn::Linear(5, 3));
  torch::Tensor scale = register_buffer("scale", torch::ones({1}));
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(first(x))) * scale; }
};
TORCH_MODULE(Net);

const Dataset data{torch::rand({24, 6}), torch::arange(24) % 3};

// Gives what check_replicas throws on the ranks of this process, after `change` on each.
std::vector<lockstep::Caught> errors_after(int world,
                                           const std::function<void(DataParallel<NetImpl>&, Rank&)>& change) {
  std::vector<lockstep::Caught> errors;
  std::mutex mutex;
  run(test_devices(world), [&](Rank& rank) {
    DataParallel net(Net(), rank);
    change(net, rank);
    auto error = error_of([&] { check_replicas(net); });
    const std::lock_guard lock(mutex);
    errors.push_back(std::move(error));
  });
  return errors;
}

void step(DataParallel<NetImpl>& net, Rank& rank, bool update) {
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (auto& batch : batches(data, {.size = 24}, rank)) {
    sgd.zero_grad();
    net.loss(batch, F::cross_entropy).backward();
    if (update) sgd.step();
  }
}

TEST_P(CheckReplicasWorlds, RanksThatTrainAlikeStayEqual) {
  EXPECT_THAT(errors_after(GetParam(), [](auto& net, Rank& rank) { step(net, rank, true); }), Each("(no error)"));
}

TEST_P(CheckReplicasWorlds, AStepOfOneRankAloneIsNamedOnAll) {
  const int odd = GetParam() - 1;
  const auto errors = errors_after(GetParam(), [&](auto& net, Rank& rank) { step(net, rank, rank.index() == odd); });
  const auto differ = GetParam() == 2 ? Fails(Error::difference) : Fails(Error::difference, {odd});  // either of two
  EXPECT_THAT(errors, GetParam() == 1 ? testing::Matcher<decltype(errors)>(Each("(no error)")) : Each(differ));
}

TEST(CheckReplicas, WeightsThatOneRankLoadedAreNamed) {
  const auto errors = errors_after(3, [](auto& net, Rank& rank) {
    const torch::NoGradGuard no_grad;
    if (rank.index() == 1) net->last->bias.copy_(torch::ones({3}));
  });
  EXPECT_THAT(errors, AllOf(SizeIs(3), Each(Fails(Error::difference, {1}))));
}

TEST(CheckReplicas, WithoutAMajorityAllAreNamed) {
  const auto errors = errors_after(4, [](auto& net, Rank& rank) {
    const torch::NoGradGuard no_grad;
    if (rank.index() % 2 == 1) net->last->weight.zero_();
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference)));
}

TEST(CheckReplicas, SeveralRanksThatDifferEachInAnotherWayAreAllNamed) {
  const auto errors = errors_after(4, [](auto& net, Rank& rank) {
    const torch::NoGradGuard no_grad;
    if (rank.index() == 1) net->last->weight.zero_();
    if (rank.index() == 2) net->first->bias.zero_();
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference, {1, 2})));
}

TEST(CheckReplicas, BuffersCountButNotWhatFollowsTheSamples) {
  const auto forwards = [](auto& net, Rank& rank) { net(data.x.slice(0, rank.index(), rank.index() + 3)); };
  EXPECT_THAT(errors_after(2, forwards), Each("(no error)"));
  const auto scales = [](auto& net, Rank& rank) { net->scale.fill_(rank.index()); };
  EXPECT_THAT(errors_after(2, scales), Each(Fails(Error::difference)));
}

// By grains they are equal on all ranks, until one rank's memory changes.
TEST(CheckReplicas, RunningStatisticsCountByGrains) {
  for (const int64_t grain : {0, 4}) {
    run(test_devices(3), [&](Rank& rank) {
      DataParallel net(Net(), rank);
      Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      const auto error = [&](bool with_optimizer) {
        return error_of([&] { with_optimizer ? check_replicas(sgd) : check_replicas(net); });
      };
      EXPECT_EQ(error(false), "(no error)");
      for (auto& batch :
           batches({data.x.to(rank.device()), data.y.to(rank.device())}, {.size = 24, .grain = grain}, rank)) {
        sgd.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        sgd.step();
      }
      EXPECT_EQ(error(false), "(no error)") << grain;
      EXPECT_EQ(error(true), "(no error)") << grain;
      if (rank.index() == 1) net->norm->running_var.view(torch::kInt)[2].bitwise_xor_(1);
      for (const bool with_optimizer : {false, true}) {
        if (grain == 0) EXPECT_EQ(error(with_optimizer), "(no error)");
        if (grain != 0) EXPECT_THAT(error(with_optimizer), Fails(Error::difference, {1}));
      }
    });
  }
}

TEST(CheckReplicas, TheStateOfAnOptimizerCounts) {
  const auto with_flip = [](const auto& options, auto flip) {
    run(test_devices(3), [&](Rank& rank) {
      DataParallel net(Net(), rank);
      Optimizer optimizer(net, options);
      for (auto& batch : batches({data.x.to(rank.device()), data.y.to(rank.device())}, {.size = 12}, rank)) {
        optimizer.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        optimizer.step();
      }
      check_replicas(optimizer);
      auto& state = *optimizer.inner().state().at(net->first->weight.unsafeGetTensorImpl());
      if (rank.index() == 1) flip(state);
      EXPECT_EQ(error_of([&] { check_replicas(net); }), "(no error)");
      EXPECT_THAT(error_of([&] { check_replicas(optimizer); }), Fails(Error::difference, {1}));
    });
  };
  with_flip(torch::optim::SGDOptions(0.1).momentum(0.9), [](auto& state) {
    auto& momentum = static_cast<torch::optim::SGDParamState&>(state).momentum_buffer();
    momentum.view(torch::kInt)[2][3].bitwise_xor_(1);
  });
  const torch::optim::AdamOptions adam(0.01);
  with_flip(adam, [](auto& state) {
    static_cast<torch::optim::AdamParamState&>(state).exp_avg_sq().view(torch::kInt)[0][0].bitwise_xor_(1 << 30);
  });
  with_flip(adam, [](auto& state) { static_cast<torch::optim::AdamParamState&>(state).step() ^= 4; });
}

// By `.data()` nobody counts a write, as nobody does of a bit that flips.
TEST(CheckReplicas, MemoryThatSomebodyWritesIsNoFault) {
  run(test_devices(3), [](Rank& rank) {
    const torch::Tensor values = torch::zeros({9}, torch::TensorOptions(rank.device()).dtype(torch::kInt));
    MemoryWatch watch;
    const auto ranks_after = [&](const std::function<void()>& change) {
      watch.note({watched("values", values)});
      change();
      try {
        watch.check({watched("values", values)}, rank);
      } catch (const ReplicasDiffer& difference) {
        return difference.ranks();
      }
      return std::vector<int>{-1};
    };
    EXPECT_FALSE(watch.has_notes());
    EXPECT_EQ(ranks_after([&] { values.add_(rank.index()); }), std::vector<int>{-1});
    const auto flip = [&] { values.data()[8].bitwise_xor_(1); };
    const auto flip_on_some = [&] { rank.index() > 0 ? flip() : void(); };
    EXPECT_EQ(ranks_after(flip_on_some), (std::vector{1, 2}));
    EXPECT_EQ(ranks_after(flip), std::vector<int>());
  });
}

// Tensors of sizes with and without a rest.
TEST(CheckReplicas, OneBitIsFound) {
  for (const int64_t size : {1, 3, 4, 8, 9, 33}) {
    for (int64_t bit = 0; bit < 32 * size; bit += 13) {
      run(test_devices(2), [&](Rank& rank) {
        nn::Module module;
        torch::Tensor values = module.register_buffer("values", torch::zeros({size}, torch::kInt));
        check_replicas(module, rank);
        if (rank.index() == 1) values[bit / 32] = static_cast<int32_t>(1u << (bit % 32));
        EXPECT_THAT(error_of([&] { check_replicas(module, rank); }), Fails(Error::difference)) << bit << " of " << size;
      });
    }
  }
}

TEST(CheckReplicas, OtherNetworksAreTold) {
  const auto errors = errors_after(2, [](auto& net, Rank& rank) {
    if (rank.index() == 1) net->register_parameter("late", torch::zeros({1}));
  });
  EXPECT_THAT(errors, Each(Fails(Error::difference)));
}

TEST(CheckReplicas, OfAGroupNamesRanksByTheirNumberInTheRun) {
  run(test_devices(4), [](Rank& rank) {
    Rank group = rank.group(rank.index() % 2);
    nn::Linear net(2, 2);
    const torch::NoGradGuard no_grad;
    net->weight.fill_(rank.index() == 3 ? 2 : 1);
    net->bias.zero_();
    const auto error = error_of([&] { check_replicas(*net, group); });
    if (rank.index() % 2 == 0) EXPECT_EQ(error, "(no error)");
    if (rank.index() % 2 == 1) EXPECT_THAT(error, HasSubstr("rank 3 (cpu) from rank 1 (cpu) in weight"));
  });
}

}  // namespace check_replicas_test
