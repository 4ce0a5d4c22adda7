// Labels: concurrency 3x3 2x4
// HalfPrecisionHook over 1 to 4 CPU ranks: what 16 bits round, and what they save.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/ranks/traffic.hpp>

#include "data_parallel/backward_report.hpp"
#include "support/group_tests.hpp"
#include "support/hook_tests.hpp"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace half_precision_hook_test {

using torch::Tensor;

using HalfPrecisionHookWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, HalfPrecisionHookWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(HalfPrecisionHookWorlds, RoundsOncePerRankAndAddition) {
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
      DataParallel net(GivenWeights({mine}), rank, with_hook(std::make_shared<HalfPrecisionHook>(type)));
      backward_with(net, {mine});
      const Tensor average = on_host(net->parameters()[0].grad());
      EXPECT_EQ(average.scalar_type(), torch::kFloat);
      EXPECT_TRUE(average.equal(average.to(type).to(torch::kFloat)));  // it came in 16 bits
      const double unit = type == torch::kHalf ? 0x1p-11 : 0x1p-8;     // unit of one rounding
      EXPECT_LE(((average - mean).abs() - rank.world_size() * unit * sizes).max().item<double>(), 1e-7);
      expect_equal_on_all_ranks(net->parameters()[0].grad(), rank, "average");
    });
  }
}

TEST_P(HalfPrecisionHookWorlds, DividesFloat16BeforeItAdds) {
  on_ranks([](Rank& rank) {
    const std::vector<Tensor> gradients{torch::tensor({40000.0, 65504.0 * rank.world_size(), 1e-9})};
    DataParallel net(GivenWeights(gradients), rank, with_hook(std::make_shared<HalfPrecisionHook>(torch::kHalf)));
    backward_with(net, {gradients[0] * torch::tensor({1.0, 2.0, 1.0})});
    const Tensor average = net->parameters()[0].grad();
    EXPECT_NEAR(average[0].item<double>(), 40000, 40);
    EXPECT_TRUE(std::isinf(average[1].item<double>()));
    EXPECT_EQ(average[2].item<double>(), 0);
  });
}

TEST_P(HalfPrecisionHookWorlds, SendsHalfOfTheBytes) {
  on_ranks([](Rank& rank) {
    const auto bytes = [&](std::shared_ptr<CommunicationHook> hook, torch::ScalarType type) {
      const auto traffic = std::make_shared<Traffic>();
      Rank counted = Traffic::observed(rank, traffic);
      const std::vector<Tensor> gradients{torch::ones({100}, type)};
      DataParallel net(GivenWeights(gradients), counted, with_hook(std::move(hook)));
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

TEST(HalfPrecisionHook, RefusesTypesOfMoreBits) {
  EXPECT_THAT(error_of([] { HalfPrecisionHook hook(at::kFloat); }), Refused());
}

}  // namespace half_precision_hook_test
}  // namespace lockstep
