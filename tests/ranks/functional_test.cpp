// Labels: concurrency 3x3 2x4
// The differentiable collectives over 1 to 4 CPU ranks, against the same computed whole.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/ranks/functional.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"

#include <functional>
#include <string>
#include <vector>

namespace lockstep {
namespace functional_test {

using torch::Tensor;

constexpr double kTolerance = 1e-12;

Tensor doubles(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kDouble);
}

Tensor leaf(const Tensor& values) {
  return values.detach().clone().requires_grad_();
}

class FunctionalWorlds : public Worlds {
 protected:
  static double sum_of_factors() { return GetParam() * (GetParam() + 1) / 2.0; }  // 1 + 2 + ... + ranks
};
INSTANTIATE_TEST_SUITE_P(Sizes, FunctionalWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// NCCL refuses other memory, and so does the counting backend.
TEST_P(FunctionalWorlds, TransposedMemoryTravelsInTheOrderOfItsDimensions) {
  const Tensor whole = doubles({3, 4});
  on_ranks([&](Rank& rank) {
    Rank strict = counted(rank, std::make_shared<CountingBackend::Calls>());
    const Tensor x = leaf(whole.to(rank.device()).t().contiguous().t());
    expect_near(reduce_from_group(x, strict).detach(), whole * rank.world_size(), kTolerance, "reduced");
  });
}

// ---- Functions -----------------------------------------------------------------------------------------------------

TEST_P(FunctionalWorlds, CopyGivesTheSameAndAddsGradients) {
  const Tensor whole = doubles({3, 4}), grad = doubles({3, 4});
  on_ranks([&](Rank& rank) {
    const Tensor x = leaf(whole.to(rank.device()));
    const Tensor y = copy_to_group(x, rank);
    EXPECT_TRUE(y.cpu().equal(whole));
    y.backward((grad * (rank.index() + 1)).to(rank.device()));
    expect_near(x.grad(), grad * sum_of_factors(), kTolerance, "gradient");
    expect_equal_on_all_ranks(x.grad(), rank, "gradient");
  });
}

TEST_P(FunctionalWorlds, ReduceAddsAndPassesGradientsOn) {
  const Tensor whole = doubles({3, 4}), grad = doubles({3, 4});
  on_ranks([&](Rank& rank) {
    const Tensor x = leaf((whole * (rank.index() + 1)).to(rank.device()));
    const Tensor y = reduce_from_group(x, rank);
    expect_near(y.detach(), whole * sum_of_factors(), kTolerance, "sum");
    expect_equal_on_all_ranks(y, rank, "sum");
    EXPECT_TRUE(x.cpu().equal(whole * (rank.index() + 1)));  // the input stays
    y.backward(grad.to(rank.device()));
    EXPECT_TRUE(x.grad().cpu().equal(grad));
  });
}

TEST_P(FunctionalWorlds, GatherJoinsPartsAndScatterTakesThem) {
  for (const int64_t dim : {0, 1, -1}) {
    for (const int64_t total : {4, 12, 13}) {  // equal parts and others
      SCOPED_TRACE(testing::Message() << "dimension " << dim << ", total " << total);
      std::vector<int64_t> sizes{2, 3, 2};
      sizes[dim < 0 ? dim + 3 : dim] = total;
      const Tensor whole = doubles(sizes), grad = doubles(sizes);
      on_ranks([&](Rank& rank) {
        for (const int64_t told : {total, int64_t{0}}) {
          const Tensor x = leaf(slice_of(whole, dim, rank));
          const Tensor y = gather_from_group(x, dim, rank, told);
          EXPECT_TRUE(y.cpu().equal(whole));
          y.backward(grad.to(rank.device()));
          EXPECT_TRUE(x.grad().cpu().equal(slice_of(grad, dim, rank).cpu()));
        }
        const Tensor x = leaf(whole.to(rank.device()));
        const Tensor y = scatter_to_group(x, dim, rank);
        EXPECT_TRUE(y.cpu().equal(slice_of(whole, dim, rank).cpu()));
        y.backward(slice_of(grad, dim, rank));
        EXPECT_TRUE(x.grad().cpu().equal(grad));
      });
    }
  }
}

TEST_P(FunctionalWorlds, GatherTakesPartsOfAnySize) {
  const int world = GetParam();
  std::vector<Tensor> parts, grads;
  for (int i = 0; i < world; ++i) parts.push_back(doubles({2, (i * 3) % 4}));  // 0, 3, 2, 1
  const Tensor whole = torch::cat(parts, 1), grad = doubles(whole.sizes());
  on_ranks([&](Rank& rank) {
    const Tensor x = leaf(parts[rank.index()].to(rank.device()));
    const Tensor y = gather_from_group(x, 1, rank);
    EXPECT_TRUE(y.cpu().equal(whole));
    y.backward(grad.to(rank.device()));
    int64_t begin = 0;
    for (int i = 0; i < rank.index(); ++i) begin += parts[i].size(1);
    EXPECT_TRUE(x.grad().cpu().equal(grad.narrow(1, begin, x.size(1))));
  });
}

TEST_P(FunctionalWorlds, AnExchangeInOneStepIsItsTwoSteps) {
  for (const int64_t total : {12, 7}) {
    const Tensor whole = doubles({3, total, 2}), grad = doubles({3, total, 2});
    on_ranks([&](Rank& rank) {
      const Tensor x = leaf(slice_of(whole, 1, rank)), same = leaf(x);
      const Tensor y = allgather_with_gradient(x, rank, 1, total);
      EXPECT_TRUE(y.cpu().equal(whole));
      y.backward((grad * (rank.index() + 1)).to(rank.device()));
      copy_to_group(gather_from_group(same, 1, rank, total), rank)
          .backward((grad * (rank.index() + 1)).to(rank.device()));
      expect_near(x.grad(), same.grad(), kTolerance, "gathered: gradient");
    });
  }
}

TEST_P(FunctionalWorlds, FunctionsCanBeDifferentiatedTwice) {
  const int world = GetParam();
  const Tensor values = doubles({4, 12}), weights = doubles({4, 12});
  const auto second = [](const Tensor& y, const Tensor& x) {
    const Tensor first = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.pow(3).sum()}, {x})[0];
  };
  const Tensor x = leaf(values);
  const Tensor through_sum = second((x.pow(3) * weights).sum(), x);
  const Tensor through_slices = second((x.pow(3) * weights).pow(2).sum(), x);
  on_ranks([&](Rank& rank) {
    const Tensor x = leaf(values.to(rank.device()));
    const Tensor own_weights = weights.to(rank.device()), share = own_weights * (rank.index() + 1) / sum_of_factors();
    const Tensor sum = reduce_from_group(copy_to_group(x, rank).pow(3) * share, rank);
    expect_near(second(sum.sum(), x), through_sum, 1e-11, "copy and reduce");

    const Tensor z = leaf(values.to(rank.device()));
    const Tensor part = scatter_to_group(z, 1, rank).pow(3) * slice_of(weights, 1, rank);
    expect_near(second(gather_from_group(part, 1, rank, 12).pow(2).sum(), z), through_slices, 1e-11,
                "scatter and gather");

    const Tensor w = leaf(values.to(rank.device()));
    const Tensor gathered = allgather_with_gradient(scatter_to_group(w, 1, rank).pow(3), rank, 1, 12);
    const Tensor reduced = scatter_to_group(reduce_from_group(gathered * own_weights / world, rank), 1, rank);
    expect_near(second(gather_from_group(reduced, 1, rank, 12).pow(2).sum(), w), through_slices, 1e-11,
                "gather, reduce and scatter");
  });
}

TEST_P(FunctionalWorlds, AllreduceAddsGradientsToo) {
  const Tensor whole = doubles({3, 4}), grad = doubles({3, 4});
  on_ranks([&](Rank& rank) {
    const Tensor x = leaf((whole * (rank.index() + 1)).to(rank.device()));
    const Tensor y = allreduce_with_gradient(x, rank);
    expect_near(y.detach(), whole * sum_of_factors(), kTolerance, "sum");
    y.backward((grad * (rank.index() + 1)).to(rank.device()));
    expect_near(x.grad(), grad * sum_of_factors(), kTolerance, "gradient");
  });
}

// ---- Wrong gradients -----------------------------------------------------------------------------------------------

// Each rank has its own gradient, which gather_from_group would leave at that.
TEST(FunctionalTest, GradientsThatDifferAreNoticedInTheFirstBackward) {
  EXPECT_THAT(errors_on_ranks(3,
                              [](Rank& rank) {
                                const Tensor x = leaf(torch::ones({rank.index(), 2}, rank.device()));
                                (gather_from_group(x, 0, rank).sum() * rank.index()).backward();
                              }),
              testing::Each(Fails(Error::difference)));
}

TEST(FunctionalTest, GatheringForADataParallelIsRefusedAlsoWhereGradientsAreEqual) {
  EXPECT_THAT(
      errors_on_ranks(2,
                      [](Rank& rank) {
                        DataParallel net(torch::nn::Linear(2, 2), rank);
                        const Tensor all = gather_from_group(net(torch::ones({3, 2}, rank.device())), 0, rank, 6);
                        net.mean(all.mean(), 1, rank.world_size()).backward();
                      }),
      testing::Each(Refused()));
}

TEST(FunctionalTest, ARankWithoutAGraphIsAnErrorOfAllRanks) {
  EXPECT_THAT(errors_on_ranks(2,
                              [](Rank& rank) {
                                const Tensor x = torch::ones({2, 2}, rank.device()).requires_grad_(rank.index() == 0);
                                allgather_with_gradient(x, rank);
                              }),
              testing::Each(Refused()));
}

// ---- Bad input -----------------------------------------------------------------------------------------------------

TEST(FunctionalTest, TensorsThatDoNotFitAreErrors) {
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { gather_from_group(torch::ones({2, 3}), 1, rank, 5); }), Refused());
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { scatter_to_group(torch::ones({2, 3}), 2, rank); }), Refused());
}

}  // namespace functional_test
}  // namespace lockstep
