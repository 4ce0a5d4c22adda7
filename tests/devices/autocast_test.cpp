// Labels: concurrency
// Autocast: what it casts, where, and that everything is as before behind the scope.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/devices/autocast.hpp>

#include <thread>

namespace autocast_test {

using lockstep::Autocast;

const torch::Device cpu = torch::kCPU;

at::ScalarType type_of_product(at::ScalarType type = torch::kFloat) {
  const torch::Tensor square = torch::ones({4, 4}, type);
  return torch::mm(square, square).scalar_type();
}

TEST(Autocast, ComputesProductsInBfloat16AndNothingElse) {
  const Autocast bf16(cpu);
  EXPECT_EQ(type_of_product(), torch::kBFloat16);
  EXPECT_EQ((torch::ones({2}) + torch::ones({2})).scalar_type(), torch::kFloat);
  const auto logits = torch::randn({3, 10}).to(torch::kBFloat16);
  EXPECT_EQ(torch::nn::functional::cross_entropy(logits, torch::zeros({3}, torch::kLong)).scalar_type(), torch::kFloat);
}

TEST(Autocast, LeavesFloat64Alone) {
  const Autocast bf16(cpu);
  EXPECT_EQ(type_of_product(torch::kDouble), torch::kDouble);
}

TEST(Autocast, EndsWithItsScopeAndNests) {
  {
    const Autocast bf16(cpu);
    {
      const Autocast none(cpu, torch::kBFloat16, /*enabled=*/false);
      EXPECT_EQ(type_of_product(), torch::kFloat);
      const Autocast half(cpu, torch::kHalf);
      EXPECT_EQ(type_of_product(), torch::kHalf);
    }
    EXPECT_EQ(type_of_product(), torch::kBFloat16);
  }
  EXPECT_EQ(type_of_product(), torch::kFloat);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
}

TEST(Autocast, IsItsThreadsOwn) {
  const Autocast bf16(cpu);
  at::ScalarType elsewhere = torch::kHalf;
  std::thread([&] { elsewhere = type_of_product(); }).join();
  EXPECT_EQ(elsewhere, torch::kFloat);
}

TEST(Autocast, WeightsAndTheirGradientsStayFloat32) {
  torch::manual_seed(0);
  torch::nn::Linear layer(8, 4);
  const torch::Tensor x = torch::randn({16, 8});
  const auto loss = [&](bool enabled) {
    const Autocast bf16(cpu, torch::kBFloat16, enabled);
    return layer(x).square().mean();
  };
  loss(false).backward();
  const torch::Tensor exact = layer->weight.grad().clone();
  layer->zero_grad();
  loss(true).backward();
  EXPECT_EQ(layer->weight.scalar_type(), torch::kFloat);
  EXPECT_EQ(layer->weight.grad().scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::allclose(layer->weight.grad(), exact, 0.05, 0.01));
  EXPECT_FALSE(torch::equal(layer->weight.grad(), exact));
}

// A cast that outlived its scope would hide an update of the weight.
TEST(Autocast, SeesWeightsThatChangedSinceTheScopeBefore) {
  const torch::Tensor weight = torch::ones({4, 4}).requires_grad_();
  const auto product = [&] {
    const Autocast bf16(cpu);
    return torch::mm(torch::ones({1, 4}), weight)[0][0].item<float>();
  };
  EXPECT_EQ(product(), 4);
  {
    const torch::NoGradGuard no_grad;
    weight.mul_(2);
  }
  EXPECT_EQ(product(), 8);
}

}  // namespace autocast_test
