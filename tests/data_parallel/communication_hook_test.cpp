// Labels: concurrency 3x3 2x4
// DataParallel with communication hooks over 1 to 4 CPU ranks: a user's own, and the order of their rounds.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "support/group_tests.hpp"
#include "support/hook_tests.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {
namespace communication_hook_test {

using testing::ElementsAre;
using torch::Tensor;

using CommunicationHookWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, CommunicationHookWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// communication_hook.hpp has this hook as its example.
struct SignHook : CommunicationHook {  // each rank's vote on the direction, a byte per value
  CommunicationHook::Round average(const GradientBucket& bucket, Rank& rank) override {
    const Tensor votes = bucket.flat.sign().to(at::kChar);
    const auto finish = [flat = bucket.flat, votes] { flat.copy_(votes.sign()); };
    return {.work = CommunicationHook::post_allreduce(rank, votes), .finish = finish};
  }
};

const DataParallelOptions one_each{.bucket_bytes = 1, .first_bucket_bytes = 1};  // a bucket per parameter

TEST_P(CommunicationHookWorlds, AUsersHookDecidesWhatTheAverageIs) {
  on_ranks([](Rank& rank) {
    const Tensor mine = torch::tensor({1.0, -2.0, rank.index() == 0 ? 3.0 : -0.5, 0.0});
    DataParallel net(GivenWeights({mine}), rank, with_hook(std::make_shared<SignHook>()));
    for (int step = 0; step < 2; ++step) {
      backward_with(net, {mine});
      const double others = rank.world_size() - 1;
      const double vote = others > 1 ? -1 : others == 1 ? 0 : 1;
      EXPECT_TRUE(net->parameters()[0].grad().cpu().equal(torch::tensor({1.0, -1.0, vote, 0.0})));
    }
  });
}

TEST_P(CommunicationHookWorlds, APlainHookIsNoHookToTheBit) {
  std::vector<std::vector<Tensor>> gradients;  // by rank
  for (int rank = 0; rank < GetParam(); ++rank) {
    gradients.push_back({torch::randn({7, 3}), torch::randn({5}, torch::kDouble), torch::randn({11})});
  }
  on_ranks([&](Rank& rank) {
    const auto& mine = gradients[rank.index()];
    for (const bool overlap : {true, false}) {
      for (auto options : {one_each, DataParallelOptions()}) {
        options.overlap = overlap;
        DataParallel plain(GivenWeights(mine), rank, options);
        DataParallel hooked(GivenWeights(mine), rank, with_hook(std::make_shared<PlainHook>(), options));
        for (int step = 0; step < 2; ++step) {  // the second in the buckets' learnt order
          backward_with(plain, mine);
          backward_with(hooked, mine);
          for (size_t i = 0; i < mine.size(); ++i) {
            EXPECT_TRUE(hooked->parameters()[i].grad().equal(plain->parameters()[i].grad())) << i;
          }
        }
      }
    }
  });
}

// `rounds` of them, which rank and bucket begin at other times; each adds its number to the log.
struct Rounds : CommunicationHook {
  Rounds(int rounds, std::vector<std::string>& log) : rounds(rounds), log(log) {}
  CommunicationHook::Round average(const GradientBucket& bucket, Rank& rank) override { return round(1, bucket, rank); }
  CommunicationHook::Round round(int number, const GradientBucket& bucket, Rank& rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds((rank.index() + number) % 3));
    log.push_back(bucket.names[0] + "." + std::to_string(number));
    CommunicationHook::Round round{.work = CommunicationHook::post_allreduce(rank, bucket.flat, c10d::ReduceOp::AVG)};
    if (number < rounds) round.next = [this, number, &bucket, &rank] { return this->round(number + 1, bucket, rank); };
    return round;
  }
  const int rounds;
  std::vector<std::string>& log;
};

TEST_P(CommunicationHookWorlds, RoundsHaveOneOrderOnAllRanks) {
  on_ranks([](Rank& rank) {
    for (const bool overlap : {true, false}) {
      std::vector<std::string> log;
      auto options = with_hook(std::make_shared<Rounds>(3, log), one_each);
      options.overlap = overlap;
      const std::vector<Tensor> mine{torch::full({1}, rank.index() + 1.0), torch::full({2}, rank.index() + 1.0),
                                     torch::full({3}, rank.index() + 1.0)};
      DataParallel net(GivenWeights(mine), rank, options);
      for (int step = 0; step < 3; ++step) {
        log.clear();
        backward_with(net, mine);
        // Three averages of one value are that value.
        for (const auto& parameter : net->parameters()) {
          EXPECT_TRUE(torch::allclose(parameter.grad(), torch::full_like(parameter, (rank.world_size() + 1) / 2.0)));
        }
        ASSERT_EQ(log.size(), 9u);
        const auto name = [&](size_t i) { return log[i].substr(0, 2); };
        const std::string a = name(0), b = name(1), c = name(3);
        EXPECT_THAT(
            log, ElementsAre(a + ".1", b + ".1", a + ".2", c + ".1", a + ".3", b + ".2", b + ".3", c + ".2", c + ".3"));
      }
    }
  });
}

TEST(CommunicationHook, StartsWhileBackwardComputesOthers) {
  run(test_devices(2), [](Rank& rank) {
    std::vector<std::string> log;
    DataParallel net(GivenWeights({torch::ones({1}), torch::ones({2})}), rank,
                     with_hook(std::make_shared<Rounds>(2, log), one_each));
    for (int step = 0; step < 2; ++step) {
      log.clear();
      net.backward_through([&] {
        Tensor first = net->parameters()[0].sum() * 1;
        first.register_hook([&](const Tensor&) { log.push_back("computes w0"); });
        (first * net->parameters()[1].sum()).backward();
      });
      EXPECT_THAT(log, ElementsAre("w1.1", "computes w0", "w0.1", "w1.2", "w0.2"));
    }
  });
}

TEST(CommunicationHook, FailuresNameWhoAndWhat) {
  struct Broken : CommunicationHook {
    CommunicationHook::Round average(const GradientBucket&, Rank& rank) override {
      if (rank.index() == 1) throw Error("no average today");
      return {.work = CommunicationHook::post_allreduce(rank, torch::ones({1}))};
    }
  };
  const std::vector<Tensor> gradients{torch::ones({3})};
  EXPECT_THAT(error_on_ranks(2,
                             [&](Rank& rank) {
                               DataParallel net(GivenWeights(gradients), rank, with_hook(std::make_shared<Broken>()));
                               backward_with(net, gradients);
                             }),
              Fails(Error::refused, {1}));
  const auto one = std::make_shared<PlainHook>();
  EXPECT_THAT(error_on_ranks(2,
                             [&](Rank& rank) {
                               DataParallel net(GivenWeights(gradients), rank, with_hook(one));
                               rank.barrier();
                             }),
              Refused());
  run(test_devices(1), [&](Rank& rank) {  // one after the other
    { DataParallel net(GivenWeights(gradients), rank, with_hook(one)); }
    DataParallel net(GivenWeights(gradients), rank, with_hook(one));
  });
}

}  // namespace communication_hook_test
}  // namespace lockstep
