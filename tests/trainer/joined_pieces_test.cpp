// Labels: concurrency
// Tensors of which ranks have pieces: joined, whatever overlaps, and an error where nobody has a value.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include "trainer/joined_pieces.hpp"

#include <string>
#include <vector>

namespace lockstep {
namespace joined_pieces_test {

StatePiece piece_of(const std::string& name, const at::Tensor& whole, int64_t begin, int64_t end) {
  return {.name = name,
          .sizes = whole.sizes().vec(),
          .strides = whole.strides().vec(),
          .begin = begin,
          .values = whole.as_strided({whole.numel()}, {1}).slice(0, begin, end).clone()};
}

io::NamedTensors joined(const std::vector<std::vector<StatePiece>>& of_ranks, int who) {
  io::NamedTensors found;
  run(Devices(of_ranks.size(), torch::kCPU), [&](Rank& rank) {
    const auto tensors = joined_pieces(of_ranks[static_cast<size_t>(rank.index())], rank);
    if (rank.index() == who) found = tensors;
  });
  return found;
}

TEST(JoinedPieces, AreTheWholeTensorsOnEachRank) {
  const auto images = torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto bytes = torch::arange(7, torch::kByte), step = torch::tensor(12, torch::kLong);
  const StatePiece number{.name = "step", .values = step};
  const std::vector<std::vector<StatePiece>> of_ranks = {
      {piece_of("images", images, 50, 120), number, piece_of("bytes", bytes, 0, 3)},
      {},
      {piece_of("bytes", bytes, 2, 7), piece_of("images", images, 0, 70), number}};
  for (const int who : {0, 1, 2}) {
    const auto tensors = joined(of_ranks, who);
    ASSERT_EQ(tensors.size(), 3u);  // by name
    EXPECT_TRUE(tensors[0].second.equal(bytes));
    EXPECT_TRUE(tensors[1].second.equal(images));
    EXPECT_EQ(tensors[1].second.strides(), images.strides());
    EXPECT_TRUE(tensors[2].second.equal(step));
    EXPECT_EQ(tensors[2].second.scalar_type(), at::kLong);
  }
}

TEST(JoinedPieces, AreRefusedWhereNobodyHasAValue) {
  const auto values = torch::randn({9});
  try {
    joined({{piece_of("weight", values, 0, 4)}, {piece_of("weight", values, 5, 9)}}, 0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("both ranks that kept a slice are gone"),
                                             testing::HasSubstr("'weight'")));
  }
}

}  // namespace joined_pieces_test
}  // namespace lockstep
