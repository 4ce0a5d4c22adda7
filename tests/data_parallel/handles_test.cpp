// A DataParallel, a Rank, a NoSync and an Optimizer go where one puts them.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/test_devices.hpp"

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace handles_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;

struct Net : torch::nn::Module {
  Net() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return layer(x); }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 3));
};

Dataset samples() {
  torch::manual_seed(1);
  return {torch::randn({12, 4}, torch::kDouble), torch::arange(12) % 3};
}

class Handles : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, Handles, testing::Values(1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(Handles, AModuleByAUniquePtrAndARankThatIsConst) {
  const Dataset data = samples();
  run(test_devices(GetParam()), [&](const Rank& rank) {
    DataParallel net(std::make_unique<Net>(), rank);
    static_assert(std::is_same_v<decltype(net), DataParallel<Net>>);
    for (auto& batch : batches(data, {.size = 12}, rank)) net.loss(batch, F::cross_entropy).backward();
    torch::nn::Linear whole(4, 3);
    whole->to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    whole->weight.copy_(net->layer->weight);
    whole->bias.copy_(net->layer->bias);
    const torch::AutoGradMode grad(true);
    F::cross_entropy(whole(data.x), data.y).backward();
    expect_near(net->layer->weight.grad(), whole->weight.grad(), 1e-12, "weight");
  });
  EXPECT_THAT(error_on_ranks(1, [](Rank& rank) { DataParallel net(std::unique_ptr<Net>(), rank); }), Refused());
}

TEST_P(Handles, AsManyRanksAsANumberSays) {
  std::vector<int> worlds(static_cast<size_t>(GetParam()));
  run(GetParam(), [&](Rank& rank) { worlds[static_cast<size_t>(rank.index())] = rank.world_size(); });
  EXPECT_THAT(worlds, testing::Each(GetParam()));
  EXPECT_THAT(error_of([] { run(0, [](Rank&) {}); }), Refused());
}

// A guard that ends another one, and guards that end in the order in which they began.
TEST_P(Handles, ANoSyncIsAssigned) {
  const Dataset data = samples();
  on_ranks([&](Rank& rank) {
    DataParallel net(Net(), rank);
    rank.broadcast(net->layer->weight.detach());
    const auto averages = [&] {
      net->zero_grad();
      for (auto& batch : batches(data, {.size = 12}, rank)) net.loss(batch, F::cross_entropy).backward();
      const Tensor mine = net->layer->weight.grad().clone(), of_all = mine.clone();
      rank.allreduce(of_all, c10d::ReduceOp::MAX);
      return !rank.any(!of_all.equal(mine));
    };
    const bool alone = rank.world_size() == 1;
    EXPECT_TRUE(averages());
    std::optional<NoSync> guard, second;
    guard = net.no_sync();
    EXPECT_EQ(averages(), alone);
    guard = net.no_sync();
    EXPECT_EQ(averages(), alone);
    second = std::move(guard);
    guard.reset();
    EXPECT_EQ(averages(), alone);
    guard = net.no_sync();
    second.reset();
    EXPECT_EQ(averages(), alone);
    guard.reset();
    net->zero_grad();
    EXPECT_TRUE(averages());
  });
}

}  // namespace handles_test
