// WeightAverage: its values, and what an exchange does to weights that are tied.
#include "trainer/weight_average.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace weight_average_test {

using lockstep::WeightAverage;
using torch::Tensor;

TEST(WeightAverages, BeginWithTheWeightsOfTheFirstStepAndFollowThem) {
  const Tensor weights = torch::tensor({8.0, -2.0}, torch::kDouble).requires_grad_();
  WeightAverage average(0.75, {weights});
  EXPECT_FALSE(average.is_begun());
  average.exchange();
  EXPECT_TRUE(torch::equal(weights, torch::tensor({8.0, -2.0}, torch::kDouble)));
  average.add();
  {
    const torch::NoGradGuard no_grad;
    weights.zero_();
  }
  average.add();
  EXPECT_TRUE(average.is_begun());
  average.exchange();
  EXPECT_TRUE(torch::equal(weights, torch::tensor({6.0, -1.5}, torch::kDouble)));
  average.exchange();
  EXPECT_TRUE(torch::equal(weights, torch::zeros({2}, torch::kDouble)));
}

TEST(WeightAverages, GiveTiedWeightsBack) {
  const Tensor tied = torch::ones({3}), other = torch::ones({2});
  WeightAverage average(0.5, {tied, other, tied});
  average.add();
  tied.fill_(3);
  average.add();
  for (int exchanges = 0; exchanges < 4; ++exchanges) {
    average.exchange();
    EXPECT_TRUE(torch::equal(tied, torch::full({3}, exchanges % 2 == 0 ? 2.0F : 3.0F))) << exchanges;
  }
}

TEST(WeightAverages, OfNothingBeginToo) {  // with slices a rank may have none
  WeightAverage average(0.5, {});
  average.add();
  EXPECT_TRUE(average.is_begun());
}

}  // namespace weight_average_test
