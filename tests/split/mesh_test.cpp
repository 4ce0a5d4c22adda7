// Labels: concurrency 3x3 2x4
// Groups of ranks (Rank::group), and the mesh that is made of them.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/split/mesh.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <chrono>

namespace mesh_test {

using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::Mesh;
using lockstep::MeshShape;
using lockstep::Rank;
using lockstep::Refused;
using torch::Tensor;
using namespace std::chrono_literals;

// The numbers, in the world, of the ranks that a group's rank reaches.
std::vector<int64_t> reached(Rank& group, int world_index, int world_size) {
  Tensor table = torch::zeros({world_size}, torch::dtype(torch::kLong).device(group.device()));
  table[world_index] = 1;
  group.allreduce(table);
  std::vector<int64_t> numbers;
  for (int rank = 0; rank < world_size; ++rank) {
    if (table[rank].item<int64_t>() == 1) numbers.push_back(rank);
  }
  return numbers;
}

class MeshWorlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, MeshWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& world) { return std::to_string(world.param) + "Ranks"; });

TEST_P(MeshWorlds, RanksOfOneColorAreAGroup) {
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Rank group = rank.group(rank.index() % 2);
    std::vector<int64_t> expected;
    for (int other = rank.index() % 2; other < world; other += 2) expected.push_back(other);
    EXPECT_EQ(reached(group, rank.index(), world), expected);
    EXPECT_EQ(group.world_size(), static_cast<int>(expected.size()));
    EXPECT_EQ(group.index(), rank.index() / 2);
    EXPECT_EQ(group.name(), rank.name());
  });
}

// While one group has made many calls, another has made few: their calls do not mix, and messages stay in theirs.
TEST_P(MeshWorlds, GroupsCallForThemselves) {
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Rank parity = rank.group(rank.index() % 2), all = rank.group(0), own = rank.group(rank.index());
    for (int i = 0; i < 3 + rank.index() % 2; ++i) {
      Tensor sum = torch::full({4}, rank.index() + 1, rank.device());
      parity.allreduce(sum);
      int64_t expected = 0;
      for (int other = rank.index() % 2; other < world; other += 2) expected += other + 1;
      EXPECT_TRUE(torch::equal(sum.cpu(), torch::full({4}, expected)));
    }
    EXPECT_EQ(own.world_size(), 1);
    Tensor mine = torch::full({2}, rank.index(), rank.device());
    own.allreduce(mine);
    EXPECT_TRUE(torch::equal(mine.cpu(), torch::full({2}, rank.index())));
    Tensor from_root = torch::full({3}, rank.index(), rank.device());
    all.broadcast(from_root, world - 1);
    EXPECT_TRUE(torch::equal(from_root.cpu(), torch::full({3}, world - 1)));
    if (parity.world_size() == 1) return;
    // To the next of the same parity, and to the same rank in the whole world, under one tag.
    const int next = (parity.index() + 1) % parity.world_size();
    const int before = (parity.index() + parity.world_size() - 1) % parity.world_size();
    std::vector<Tensor> in_group{torch::full({2}, rank.index(), rank.device())},
        in_world{torch::full({2}, 100 + rank.index(), rank.device())};
    std::vector<Tensor> got_in_group{torch::zeros({2}, torch::dtype(torch::kLong).device(rank.device()))},
        got_in_world{torch::zeros({2}, torch::dtype(torch::kLong).device(rank.device()))};
    const auto world_rank = [&](int index) { return 2 * index + rank.index() % 2; };
    const auto first = rank.backend().send(in_world, world_rank(next), 7);
    const auto second = parity.backend().send(in_group, next, 7);
    parity.backend().recv(got_in_group, before, 7)->wait();
    rank.backend().recv(got_in_world, world_rank(before), 7)->wait();
    first->wait();
    second->wait();
    EXPECT_TRUE(torch::equal(got_in_group[0].cpu(), torch::full({2}, world_rank(before))));
    EXPECT_TRUE(torch::equal(got_in_world[0].cpu(), torch::full({2}, 100 + world_rank(before))));
  });
}

TEST_P(MeshWorlds, AGroupCanBeSplitAgain) {
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Rank half = rank.group(rank.index() / 2);
    Rank one = half.group(half.index());
    EXPECT_EQ(reached(one, rank.index(), world), std::vector<int64_t>{rank.index()});
    Rank again = half.group(3);
    EXPECT_EQ(again.world_size(), half.world_size());
  });
}

TEST(Groups, CallsThatDifferInAGroupAreAnErrorThatNamesItsRanks) {
  const auto differ = [](Rank& rank) {
    Rank parity = rank.group(rank.index() % 2);
    Tensor tensor = torch::zeros({rank.index() == 2 ? 3 : 2});
    parity.allreduce(tensor);
  };
  EXPECT_THAT(error_of([&] { lockstep::run(lockstep::test_devices(4), differ); }), Fails(Error::difference, {0, 2}));
}

// One waits in its group, the other in the world: told at once, not at the timeout.
TEST(Groups, RanksThatWaitForEachOtherInDifferentGroupsAreFound) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of([] {
                lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
                  Rank all = rank.group(0);
                  rank.index() == 0 ? all.barrier() : rank.barrier();
                });
              }),
              Fails(Error::difference));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
}

TEST(Groups, AFailureInAGroupEndsAllRanks) {
  EXPECT_THAT(error_of([] {
                lockstep::run(lockstep::test_devices(4), [](Rank& rank) {
                  Rank half = rank.group(rank.index() / 2);
                  if (rank.index() == 3) throw lockstep::Error("enough");
                  half.barrier();
                  if (half.index() == 0) half.barrier();
                  rank.barrier();
                });
              }),
              Fails(Error::refused, {3}));
}

TEST(Groups, ANegativeColorIsRefused) {
  EXPECT_THAT(error_of([] { lockstep::run(lockstep::test_devices(1), [](Rank& rank) { rank.group(-1); }); }),
              Refused());
}

TEST_P(MeshWorlds, AMeshHasEveryShape) {
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    for (const auto& shape : lockstep::mesh_shapes(world)) {
      Mesh mesh(rank, shape);
      EXPECT_EQ(mesh.data().world_size(), shape.data);
      EXPECT_EQ(mesh.pipeline().world_size(), shape.pipeline);
      EXPECT_EQ(mesh.tensor().world_size(), shape.tensor);
      const int index =
          (mesh.data().index() * shape.pipeline + mesh.pipeline().index()) * shape.tensor + mesh.tensor().index();
      EXPECT_EQ(index, rank.index());
      const auto line = [&](Rank& axis, int stride) {
        std::vector<int64_t> numbers;
        for (int i = 0; i < axis.world_size(); ++i) numbers.push_back(rank.index() + (i - axis.index()) * stride);
        EXPECT_EQ(reached(axis, rank.index(), world), numbers);
      };
      line(mesh.data(), shape.pipeline * shape.tensor);
      line(mesh.pipeline(), shape.tensor);
      line(mesh.tensor(), 1);
    }
  });
}

TEST(MeshTest, ShapesAreListedAndCounted) {
  EXPECT_EQ(lockstep::mesh_shapes(4),
            (std::vector<MeshShape>{{4, 1, 1}, {2, 2, 1}, {2, 1, 2}, {1, 4, 1}, {1, 2, 2}, {1, 1, 4}}));
  EXPECT_THAT(error_of([] { lockstep::mesh_shapes(0); }), Refused());
}

TEST(MeshTest, AShapeThatDoesNotFitIsRefusedWithThoseThatDo) {
  const auto error = error_of([] {
    lockstep::run(lockstep::test_devices(2), [](Rank& rank) { Mesh(rank, {2, 2, 1}); });
  });
  EXPECT_THAT(error, Refused());
  EXPECT_THAT(error_of([] { lockstep::check_mesh({-1, -1, 1}, 1); }), Refused());
}

}  // namespace mesh_test
