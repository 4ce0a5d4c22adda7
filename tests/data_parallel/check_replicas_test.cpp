// Labels: 3x3
// check_replicas: a replica that has become another one is found, whatever changed it, and named on all ranks.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>

#include "data_parallel/memory_watch.hpp"
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
using testing::Not;
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

// What check_replicas throws on the ranks of this process, after `change` on each.
std::vector<std::string> errors_after(int world, const std::function<void(DataParallel<NetImpl>&, Rank&)>& change) {
  std::vector<std::string> errors;
  std::mutex mutex;
  run(test_devices(world), [&](Rank& rank) {
    DataParallel net(Net(), rank);
    change(net, rank);
    std::string error = error_of([&] { check_replicas(net, rank); });
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
  const std::string name = "rank " + std::to_string(odd) + " (cpu) from ";
  const std::string others = GetParam() == 2 ? "rank 0 (cpu)" : "the others";
  EXPECT_THAT(errors, GetParam() == 1 ? testing::Matcher<decltype(errors)>(Each("(no error)"))
                                      : Each(HasSubstr("no longer equal: " + name + others + " in first.weight and ")));
}

TEST(CheckReplicas, WeightsThatOneRankLoadedAreNamed) {
  const auto errors = errors_after(3, [](auto& net, Rank& rank) {
    const torch::NoGradGuard no_grad;
    if (rank.index() == 1) net->last->bias.copy_(torch::ones({3}));
  });
  EXPECT_THAT(errors, AllOf(SizeIs(3), Each(AllOf(HasSubstr("rank 1 (cpu) from the others in last.bias. "),
                                                  HasSubstr("Load weights before the DataParallel is made")))));
}

TEST(CheckReplicas, WithoutAMajorityAllAreNamed) {
  const auto errors = errors_after(4, [](auto& net, Rank& rank) {
    const torch::NoGradGuard no_grad;
    if (rank.index() % 2 == 1) net->last->weight.zero_();
  });
  EXPECT_THAT(errors, Each(HasSubstr("equal: rank 1 (cpu) and rank 3 (cpu) from rank 0 (cpu) and rank 2 (cpu) in "
                                     "last.weight. ")));
}

TEST(CheckReplicas, SeveralRanksThatDifferEachInAnotherWayAreAllNamed) {
  const auto errors = errors_after(4, [](auto& net, Rank& rank) {
    const torch::NoGradGuard no_grad;
    if (rank.index() == 1) net->last->weight.zero_();
    if (rank.index() == 2) net->first->bias.zero_();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("rank 1 (cpu) from the others in last.weight"),
                                 HasSubstr("rank 2 (cpu) from the others in first.bias"))));
}

TEST(CheckReplicas, BuffersCountButNotWhatFollowsTheSamples) {
  const auto forwards = [](auto& net, Rank& rank) { net(data.x.slice(0, rank.index(), rank.index() + 3)); };
  EXPECT_THAT(errors_after(2, forwards), Each("(no error)"));
  const auto scales = [](auto& net, Rank& rank) { net->scale.fill_(rank.index()); };
  EXPECT_THAT(errors_after(2, scales), Each(HasSubstr("in scale. ")));
}

// By grains they are equal on all ranks, until one rank's memory changes.
TEST(CheckReplicas, RunningStatisticsCountByGrains) {
  for (const int64_t grain : {0, 4}) {
    run(test_devices(3), [&](Rank& rank) {
      DataParallel net(Net(), rank);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      const auto error = [&](bool with_optimizer) {
        return error_of([&] { with_optimizer ? check_replicas(net, sgd, rank) : check_replicas(net, rank); });
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
      const auto expected = grain == 0 ? testing::Matcher<std::string>("(no error)")
                                       : HasSubstr("rank 1 (cpu) from the others in norm.running_var. ");
      EXPECT_THAT(error(false), expected) << grain;
      EXPECT_THAT(error(true), expected) << grain;
    });
  }
}

TEST(CheckReplicas, TheOptimizersStateCountsIfItIsGiven) {
  const auto with_flip = [](auto make, auto flip) {
    run(test_devices(3), [&](Rank& rank) {
      DataParallel net(Net(), rank);
      auto optimizer = make(net->parameters());
      for (auto& batch : batches({data.x.to(rank.device()), data.y.to(rank.device())}, {.size = 12}, rank)) {
        optimizer.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        optimizer.step();
      }
      check_replicas(net, optimizer, rank);
      auto& state = *optimizer.state().at(net->first->weight.unsafeGetTensorImpl());
      if (rank.index() == 1) flip(state);
      EXPECT_EQ(error_of([&] { check_replicas(net, rank); }), "(no error)");
      EXPECT_THAT(error_of([&] { check_replicas(net, optimizer, rank); }),
                  AllOf(HasSubstr("rank 1 (cpu) from the others in the optimizer's "), HasSubstr(".first.weight. ")));
    });
  };
  with_flip([](auto parameters) { return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9)); },
            [](auto& state) {
              auto& momentum = static_cast<torch::optim::SGDParamState&>(state).momentum_buffer();
              momentum.view(torch::kInt)[2][3].bitwise_xor_(1);
            });
  const auto adam = [](auto parameters) { return torch::optim::Adam(parameters, 0.01); };
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
    const auto ranks_after = [&](const std::function<void()>& change, const std::string& text) {
      watch.note({watched("values", values)});
      change();
      try {
        watch.check({watched("values", values)}, rank);
      } catch (const ReplicasDiffer& difference) {
        EXPECT_THAT(difference.what(), AllOf(HasSubstr("nothing writes there, the memory of "), HasSubstr(text)));
        return difference.ranks();
      }
      return std::vector<int>{-1};
    };
    EXPECT_FALSE(watch.has_notes());
    EXPECT_EQ(ranks_after([&] { values.add_(rank.index()); }, ""), std::vector<int>{-1});
    const auto flip = [&] { values.data()[8].bitwise_xor_(1); };
    const auto flip_on_some = [&] { rank.index() > 0 ? flip() : void(); };
    EXPECT_EQ(ranks_after(flip_on_some, "rank 1 (cpu) in values, and of rank 2 (cpu) in values"), (std::vector{1, 2}));
    EXPECT_EQ(ranks_after(flip, "rank 0 (cpu) in values, and of "), std::vector<int>());
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
        EXPECT_THAT(error_of([&] { check_replicas(module, rank); }), HasSubstr("in values. ")) << bit << " of " << size;
      });
    }
  }
}

TEST(CheckReplicas, OtherNetworksAreTold) {
  const auto errors = errors_after(2, [](auto& net, Rank& rank) {
    if (rank.index() == 1) net->register_parameter("late", torch::zeros({1}));
  });
  EXPECT_THAT(errors, Each(HasSubstr("parameters and buffers, and ")));
}

TEST(CheckReplicas, OfAGroupNamesRanksByTheirNumberInTheRun) {
  run(test_devices(4), [](Rank& rank) {
    Rank group = rank.group(rank.index() % 2);
    nn::Linear net(2, 2);
    const torch::NoGradGuard no_grad;
    net->weight.fill_(rank.index() == 3 ? 2 : 1);
    net->bias.zero_();
    EXPECT_THAT(error_of([&] { check_replicas(*net, group); }),
                rank.index() % 2 == 0
                    ? testing::Matcher<std::string>("(no error)")
                    : AllOf(HasSubstr("rank 3 (cpu) from rank 1 (cpu) in weight"), Not(HasSubstr("rank 0"))));
  });
}

}  // namespace check_replicas_test
