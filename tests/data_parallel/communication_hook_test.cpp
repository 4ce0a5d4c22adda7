// Labels: concurrency 3x3 2x4
// DataParallel with communication hooks over 1 to 4 CPU ranks: a user's own, the order of their rounds, 16 bits.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/ranks/traffic.hpp>

#include "data_parallel/backward_report.hpp"
#include "support/group_tests.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {
namespace communication_hook_test {

using testing::ElementsAre;
using torch::Tensor;
namespace nn = torch::nn;

using CommunicationHookWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, CommunicationHookWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// communication_hook.hpp has it as its example.
struct SignHook : CommunicationHook {  // each rank's vote on the direction, a byte per value
  CommunicationHook::Round average(const GradientBucket& bucket, Rank& rank) override {
    const Tensor votes = bucket.flat.sign().to(at::kChar);
    const auto finish = [flat = bucket.flat, votes] { flat.copy_(votes.sign()); };
    return {.work = CommunicationHook::post_allreduce(rank, votes), .finish = finish};
  }
};

struct PlainHook : CommunicationHook {
  CommunicationHook::Round average(const GradientBucket& bucket, Rank& rank) override {
    return {.work = CommunicationHook::post_allreduce(rank, bucket.flat, c10d::ReduceOp::AVG)};
  }
};

// Weights whose gradients are what backward() is given.
struct Weights : nn::Module {
  explicit Weights(const std::vector<Tensor>& like) {
    for (const auto& tensor : like) {
      register_parameter(c10::str("w", parameters().size()), torch::zeros_like(tensor));
    }
  }
};

void backward_with(DataParallel<Weights>& net, const std::vector<Tensor>& gradients) {
  net->zero_grad();
  net.backward_through([&] {
    const auto parameters = net->parameters();
    Tensor sum = torch::zeros({}, parameters[0].device());
    for (size_t i = 0; i < gradients.size(); ++i) {
      sum = sum + (parameters[i] * gradients[i].to(parameters[i].device())).sum();
    }
    sum.backward();
  });
}

const DataParallelOptions one_each{.bucket_bytes = 1, .first_bucket_bytes = 1};  // a bucket per parameter

DataParallelOptions with(std::shared_ptr<CommunicationHook> hook, DataParallelOptions options = {}) {
  options.hook = std::move(hook);
  return options;
}

TEST_P(CommunicationHookWorlds, AUsersHookDecidesWhatTheAverageIs) {
  on_ranks([](Rank& rank) {
    const Tensor mine = torch::tensor({1.0, -2.0, rank.index() == 0 ? 3.0 : -0.5, 0.0});
    DataParallel net(Weights({mine}), rank, with(std::make_shared<SignHook>()));
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
        DataParallel plain(Weights(mine), rank, options);
        DataParallel hooked(Weights(mine), rank, with(std::make_shared<PlainHook>(), options));
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
      auto options = with(std::make_shared<Rounds>(3, log), one_each);
      options.overlap = overlap;
      const std::vector<Tensor> mine{torch::full({1}, rank.index() + 1.0), torch::full({2}, rank.index() + 1.0),
                                     torch::full({3}, rank.index() + 1.0)};
      DataParallel net(Weights(mine), rank, options);
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
    DataParallel net(Weights({torch::ones({1}), torch::ones({2})}), rank,
                     with(std::make_shared<Rounds>(2, log), one_each));
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
                               DataParallel net(Weights(gradients), rank, with(std::make_shared<Broken>()));
                               backward_with(net, gradients);
                             }),
              Fails(Error::refused, {1}));
  const auto one = std::make_shared<PlainHook>();
  EXPECT_THAT(error_on_ranks(2,
                             [&](Rank& rank) {
                               DataParallel net(Weights(gradients), rank, with(one));
                               rank.barrier();
                             }),
              Refused());
  run(test_devices(1), [&](Rank& rank) {  // one after the other
    { DataParallel net(Weights(gradients), rank, with(one)); }
    DataParallel net(Weights(gradients), rank, with(one));
  });
  EXPECT_THAT(error_of([] { HalfPrecisionHook hook(at::kFloat); }), Refused());
}

TEST_P(CommunicationHookWorlds, SixteenBitsRoundOncePerRankAndAddition) {
  std::vector<Tensor> gradients;
  for (int rank = 0; rank < GetParam(); ++rank) gradients.push_back(torch::randn({1000}) * (rank + 1));
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    Tensor mean = torch::zeros({1000}), sizes = torch::zeros({1000});
    for (const auto& gradient : gradients) {
      mean += gradient / GetParam();
      sizes += gradient.abs() / GetParam();
    }
    on_ranks([&](Rank& rank) {
      const Tensor& mine = gradients[rank.index()];
      DataParallel net(Weights({mine}), rank, with(std::make_shared<HalfPrecisionHook>(type)));
      backward_with(net, {mine});
      const Tensor average = on_host(net->parameters()[0].grad());
      EXPECT_EQ(average.scalar_type(), torch::kFloat);
      EXPECT_TRUE(average.equal(average.to(type).to(torch::kFloat)));  // it came in 16 bits
      const double unit = type == torch::kHalf ? 0x1p-11 : 0x1p-8;     // of one rounding
      EXPECT_LE(((average - mean).abs() - rank.world_size() * unit * sizes).max().item<double>(), 1e-7);
      expect_equal_on_all_ranks(net->parameters()[0].grad(), rank, "average");
    });
  }
}

TEST_P(CommunicationHookWorlds, Float16DividesBeforeItAdds) {
  on_ranks([](Rank& rank) {
    const std::vector<Tensor> gradients{torch::tensor({40000.0, 65504.0 * rank.world_size(), 1e-9})};
    DataParallel net(Weights(gradients), rank, with(std::make_shared<HalfPrecisionHook>(torch::kHalf)));
    backward_with(net, {gradients[0] * torch::tensor({1.0, 2.0, 1.0})});
    const Tensor average = net->parameters()[0].grad();
    EXPECT_NEAR(average[0].item<double>(), 40000, 40);
    EXPECT_TRUE(std::isinf(average[1].item<double>()));
    EXPECT_EQ(average[2].item<double>(), 0);
  });
}

TEST_P(CommunicationHookWorlds, SixteenBitsAreHalfOfTheBytes) {
  on_ranks([](Rank& rank) {
    const auto bytes = [&](std::shared_ptr<CommunicationHook> hook, torch::ScalarType type) {
      const auto traffic = std::make_shared<Traffic>();
      Rank counted = Traffic::observed(rank, traffic);
      const std::vector<Tensor> gradients{torch::ones({100}, type)};
      DataParallel net(Weights(gradients), counted, with(std::move(hook)));
      backward_with(net, gradients);
      traffic->sent = 0;
      backward_with(net, gradients);
      EXPECT_TRUE(on_host(net->parameters()[0].grad()).equal(gradients[0]));
      const int64_t report = 8 * lockstep::BackwardReport::size(1, rank.world_size()) * (rank.world_size() - 1);
      return traffic->sent * rank.world_size() / 2 - static_cast<double>(report);
    };
    const int others = rank.world_size() - 1;
    EXPECT_NEAR(bytes(nullptr, torch::kFloat), 400 * others, 1e-6);
    EXPECT_NEAR(bytes(std::make_shared<HalfPrecisionHook>(at::kBFloat16), torch::kFloat), 200 * others, 1e-6);
    EXPECT_NEAR(bytes(std::make_shared<HalfPrecisionHook>(at::kHalf), torch::kDouble), 200 * others, 1e-6);
    EXPECT_NEAR(bytes(std::make_shared<HalfPrecisionHook>(at::kHalf), torch::kBFloat16), 200 * others, 1e-6);
  });
}

}  // namespace communication_hook_test
}  // namespace lockstep
