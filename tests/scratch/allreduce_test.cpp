// Labels: concurrency
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/scratch/allreduce.hpp>

#include "support/error_of.hpp"

namespace lockstep {
namespace allreduce_test {

using Algorithm = AllreduceAlgorithm;

const std::vector<Algorithm> algorithms = {Algorithm::automatic, Algorithm::naive, Algorithm::sharded, Algorithm::ring,
                                           Algorithm::tree};

// Small integers, so that every type adds them exactly in any order; no two devices have the same.
std::vector<torch::Tensor> whole_numbers(int devices, at::IntArrayRef shape, torch::Dtype type) {
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < devices; ++i) tensors.push_back((torch::randint(0, 4, shape) + i).to(type));
  return tensors;
}

torch::Tensor sum_of(const std::vector<torch::Tensor>& tensors) {
  auto sum = tensors[0].clone();
  for (size_t i = 1; i < tensors.size(); ++i) sum = sum + tensors[i];
  return sum;
}

std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

Caught refusal(std::vector<torch::Tensor> tensors) {
  return error_of([&] { allreduce(tensors); });
}

class EachAlgorithm : public testing::TestWithParam<Algorithm> {};
INSTANTIATE_TEST_SUITE_P(Allreduce, EachAlgorithm, testing::ValuesIn(algorithms),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST_P(EachAlgorithm, GivesTheSectionsExample) {
  std::vector<torch::Tensor> data = {torch::ones({1, 2}), torch::ones({1, 2}) * 2};
  allreduce(data, GetParam());
  for (const auto& tensor : data) EXPECT_TRUE(tensor.equal(torch::full({1, 2}, 3.0f)));
}

TEST_P(EachAlgorithm, SumsRandomShapesOverOneToSevenDevices) {
  torch::manual_seed(static_cast<int>(GetParam()));
  for (int devices = 1; devices <= 7; ++devices) {
    for (int round = 0; round < 12; ++round) {
      std::vector<int64_t> shape;
      for (int64_t d = torch::randint(0, 4, {1}).item<int64_t>(); d > 0; --d) {
        shape.push_back(torch::randint(1, 8, {1}).item<int64_t>());
      }
      auto tensors = whole_numbers(devices, shape, torch::kDouble);
      const auto sum = sum_of(tensors);
      allreduce(tensors, GetParam());
      for (const auto& tensor : tensors) EXPECT_TRUE(tensor.equal(sum)) << devices << " devices, shape " << shape;
    }
  }
}

TEST_P(EachAlgorithm, SumsTensorsThatAreLargeEnoughForThreads) {
  for (int devices = 2; devices <= 5; ++devices) {
    auto tensors = whole_numbers(devices, {(1 << 15) + 7}, torch::kFloat);
    const auto sum = sum_of(tensors);
    allreduce(tensors, GetParam());
    for (const auto& tensor : tensors) EXPECT_TRUE(tensor.equal(sum)) << devices << " devices";
  }
}

TEST_P(EachAlgorithm, SumsEveryNumericType) {
  for (const auto type :
       {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong, torch::kHalf, torch::kBFloat16,
        torch::kFloat, torch::kDouble, torch::kComplexFloat, torch::kComplexDouble}) {
    auto tensors = whole_numbers(3, {2, 5}, type);
    const auto sum = sum_of(tensors);
    allreduce(tensors, GetParam());
    for (const auto& tensor : tensors) {
      EXPECT_EQ(tensor.scalar_type(), type);
      EXPECT_TRUE(tensor.equal(sum)) << type;
    }
  }
}

TEST_P(EachAlgorithm, WorksInPlaceOnTensorsWithGapsAndLeavesTheRestAlone) {
  auto storage = torch::arange(60).view({3, 4, 5}).to(torch::kDouble);
  const auto before = storage.clone();
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 3; ++i) tensors.push_back(storage[i].t().slice(0, 0, 5, 2));  // [3, 4] with strides (2, 5)
  const auto sum = sum_of(tensors);
  allreduce(tensors, GetParam());
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(storage[i].t().slice(0, 0, 5, 2).equal(sum));
    EXPECT_TRUE(storage[i].t().slice(0, 1, 5, 2).equal(before[i].t().slice(0, 1, 5, 2)));
  }
}

TEST_P(EachAlgorithm, SumsTheColumnsOfOneMatrix) {
  auto matrix = torch::arange(12).view({4, 3});
  auto columns = matrix.unbind(1);
  allreduce(columns, GetParam());
  EXPECT_TRUE(matrix.equal((torch::arange(4) * 9 + 3).view({4, 1}).expand({4, 3})));
}

TEST_P(EachAlgorithm, LeavesOneTensorAndEmptyOnesAsTheyAre) {
  std::vector<torch::Tensor> one = {torch::arange(5)};
  allreduce(one, GetParam());
  EXPECT_TRUE(one[0].equal(torch::arange(5)));
  std::vector<torch::Tensor> empty = {torch::zeros({0, 3}), torch::zeros({0, 3}), torch::zeros({0, 3})};
  allreduce(empty, GetParam());
  EXPECT_EQ(empty[2].sizes(), at::IntArrayRef({0, 3}));
}

TEST_P(EachAlgorithm, GivesTheSameBitsTwiceAndOnEveryDevice) {
  torch::manual_seed(4);
  for (int devices = 2; devices <= 5; ++devices) {
    for (int64_t size : {101, 1 << 16}) {
      std::vector<torch::Tensor> tensors;
      for (int i = 0; i < devices; ++i) tensors.push_back(torch::randn({size}) * std::pow(10.0, i));
      auto once = copies(tensors);
      auto twice = copies(tensors);
      allreduce(once, GetParam());
      allreduce(twice, GetParam());
      for (int i = 0; i < devices; ++i) {
        EXPECT_TRUE(once[i].equal(twice[i]));
        EXPECT_TRUE(once[i].equal(once[0]));
      }
      EXPECT_TRUE(once[0].allclose(sum_of(tensors), 1e-5, 0.02));  // values up to 4e4 in float32
    }
  }
}

TEST_P(EachAlgorithm, SumsLeafsThatRequireGradients) {
  for (const bool with_gaps : {false, true}) {
    std::vector<torch::Tensor> leafs;
    for (const float value : {1.0f, 2.0f}) {
      const auto matrix = torch::full({3, 4}, value);
      leafs.push_back((with_gaps ? matrix.slice(1, 0, 4, 2) : matrix).requires_grad_());
    }
    allreduce(leafs, GetParam());
    for (const auto& leaf : leafs) {
      EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
      EXPECT_TRUE(leaf.equal(torch::full_like(leaf, 3.0f)));
    }
  }
}

TEST(Allreduce, NaiveAndShardedAddInTheOrderOfTheList) {
  torch::manual_seed(5);
  for (int64_t size : {13, 1 << 16}) {
    std::vector<torch::Tensor> tensors;
    for (int i = 0; i < 5; ++i) tensors.push_back(torch::randn({size}) * std::pow(10.0, i % 3));
    const auto in_order = sum_of(tensors);
    for (const auto algorithm : {Algorithm::automatic, Algorithm::naive, Algorithm::sharded}) {
      auto data = copies(tensors);
      allreduce(data, algorithm);
      for (const auto& tensor : data) EXPECT_TRUE(tensor.equal(in_order)) << to_string(algorithm);
    }
  }
}

TEST(Allreduce, RefusesTensorsThatDifferAndNamesBoth) {
  EXPECT_THAT(refusal({torch::zeros({2, 3}), torch::zeros({2, 3}), torch::zeros({3})}), Refused());
  EXPECT_THAT(refusal({torch::zeros({2}), torch::zeros({2}, torch::kHalf)}), Refused());
  EXPECT_THAT(refusal({torch::zeros({2}), torch::zeros({2}, torch::kMeta)}), Refused());
}

TEST(Allreduce, RefusesWhatCannotBeSummed) {
  EXPECT_THAT(refusal({}), Refused());
  EXPECT_THAT(refusal({torch::zeros({2}), torch::Tensor()}), Refused());
  EXPECT_THAT(refusal({torch::zeros({2}, torch::kBool), torch::zeros({2}, torch::kBool)}), Refused());
  EXPECT_THAT(refusal({torch::eye(2).to_sparse(), torch::eye(2).to_sparse()}), Refused());
  std::vector<torch::Tensor> data = {torch::zeros({2}), torch::zeros({2})};
  EXPECT_THAT(error_of([&] { allreduce(data, static_cast<Algorithm>(9)); }), Refused());
}

TEST(Allreduce, RefusesSharedMemory) {
  const auto row = torch::arange(10);
  EXPECT_THAT(refusal({row, row}), Refused());
  EXPECT_THAT(refusal({row.slice(0, 0, 5), row.slice(0, 5, 10), row.slice(0, 4, 9)}), Refused());
  EXPECT_THAT(refusal({row.slice(0, 0, 8, 2), row.slice(0, 2, 10, 2)}), Refused());
  EXPECT_EQ(refusal({row.slice(0, 0, 10, 2), row.slice(0, 1, 10, 2)}), "(no error)");
  EXPECT_THAT(refusal({torch::zeros({1}).expand({4}), torch::zeros({4})}), Refused());
  EXPECT_THAT(refusal({torch::zeros({4}).unfold(0, 3, 1), torch::zeros({2, 3})}), Refused());
}

TEST(Allreduce, ChangesNothingWhenItRefuses) {
  std::vector<torch::Tensor> tensors = {torch::ones({2}), torch::ones({2}), torch::ones({3})};
  for (const auto algorithm : algorithms) {
    EXPECT_NE(error_of([&] { allreduce(tensors, algorithm); }), "(no error)");
    for (const auto& tensor : tensors) EXPECT_TRUE(tensor.equal(torch::ones_like(tensor)));
  }
}

}  // namespace allreduce_test
}  // namespace lockstep
