// How a parameter server's keys are spread over the ranks that keep them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "server/key_shards.hpp"

#include <algorithm>
#include <vector>

namespace key_shards_test {

using torch::Tensor;

TEST(KeyShards, AreSpreadBySizeAndEveryRowIsKeptOnce) {
  const std::vector<Tensor> parameters{torch::zeros({100, 7}), torch::zeros({}), torch::zeros({0, 3}),
                                       torch::zeros({3, 1000}, torch::kDouble), torch::zeros({50})};
  constexpr int64_t kSliceBytes = 400;
  const auto shards = lockstep::server::shard_keys(parameters, 3, kSliceBytes);
  std::vector<Tensor> kept;
  for (const auto& parameter : parameters) kept.push_back(torch::zeros_like(parameter));
  int64_t most = 0, least = 1 << 30;
  for (const auto& shard : shards) {
    most = std::max(most, shard.bytes), least = std::min(least, shard.bytes);
    int64_t end = 0;
    for (const auto& slice : shard.slices) {
      EXPECT_TRUE(slice.bytes <= kSliceBytes || slice.end - slice.begin == 1);
      EXPECT_GE(slice.offset, end);
      end = slice.offset + slice.bytes;
      lockstep::server::slice_of_parameter(kept[slice.parameter], slice).add_(1);
    }
    EXPECT_LE(end, shard.bytes);
  }
  for (const auto& count : kept) EXPECT_TRUE(count.equal(torch::ones_like(count)));
  EXPECT_LE(most - least, 8000);  // the largest slice: a row of 1000 doubles
}

}  // namespace key_shards_test
