// Labels: concurrency 3x3 2x4
// Tensor parallelism's functions over 1 to 4 CPU ranks, against the same computed whole.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/tensor_parallel/parallel_functions.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"

#include <functional>
#include <string>
#include <vector>

namespace lockstep {
namespace parallel_functions_test {

using torch::Tensor;

constexpr double kTolerance = 1e-12;

Tensor doubles(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kDouble);
}

Tensor leaf(const Tensor& values) {
  return values.detach().clone().requires_grad_();
}

class ParallelFunctionsWorlds : public Worlds {
 protected:
  static double sum_of_factors() { return GetParam() * (GetParam() + 1) / 2.0; }  // 1 + 2 + ... + ranks
};
INSTANTIATE_TEST_SUITE_P(Sizes, ParallelFunctionsWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// NCCL refuses other memory, and so does the counting backend.
TEST_P(ParallelFunctionsWorlds, TransposedMemoryTravelsInTheOrderOfItsDimensions) {
  const Tensor whole = doubles({3, 4});
  on_ranks([&](Rank& rank) {
    Rank strict = counted(rank, std::make_shared<CountingBackend::Calls>());
    const Tensor x = leaf(whole.to(rank.device()).t().contiguous().t());
    expect_near(reduce_from_group(x, strict).detach(), whole * rank.world_size(), kTolerance, "reduced");
  });
}

// ---- Functions -----------------------------------------------------------------------------------------------------

TEST_P(ParallelFunctionsWorlds, CopyGivesTheSameAndAddsGradients) {
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

TEST_P(ParallelFunctionsWorlds, ReduceAddsAndPassesGradientsOn) {
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

TEST_P(ParallelFunctionsWorlds, GatherJoinsPartsAndScatterTakesThem) {
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

TEST_P(ParallelFunctionsWorlds, GatherTakesPartsOfAnySize) {
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

TEST_P(ParallelFunctionsWorlds, ExchangesInOneStepAreTheirTwoSteps) {
  for (const int64_t total : {12, 7}) {
    const Tensor whole = doubles({3, total, 2}), grad = doubles({3, total, 2});
    on_ranks([&](Rank& rank) {
      const Tensor x = leaf(slice_of(whole, 1, rank)), same = leaf(x);
      const Tensor y = gather_in_group(x, 1, rank, total);
      EXPECT_TRUE(y.cpu().equal(whole));
      y.backward((grad * (rank.index() + 1)).to(rank.device()));
      copy_to_group(gather_from_group(same, 1, rank, total), rank)
          .backward((grad * (rank.index() + 1)).to(rank.device()));
      expect_near(x.grad(), same.grad(), kTolerance, "gathered: gradient");

      const Tensor z = leaf((whole * (rank.index() + 1)).to(rank.device())), same_z = leaf(z);
      const Tensor part = reduce_scatter_in_group(z, 1, rank);
      const Tensor same_part = scatter_to_group(reduce_from_group(same_z, rank), 1, rank);
      expect_near(part.detach(), same_part.detach(), kTolerance, "reduced");
      part.backward(slice_of(grad, 1, rank));
      same_part.backward(slice_of(grad, 1, rank));
      EXPECT_TRUE(z.grad().cpu().equal(same_z.grad().cpu()));
    });
  }
}

TEST_P(ParallelFunctionsWorlds, FunctionsCanBeDifferentiatedTwice) {
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
    const Tensor gathered = gather_in_group(scatter_to_group(w, 1, rank).pow(3), 1, rank, 12);
    const Tensor reduced = reduce_scatter_in_group(gathered * own_weights / world, 1, rank);
    expect_near(second(gather_from_group(reduced, 1, rank, 12).pow(2).sum(), w), through_slices, 1e-11,
                "gather and reduce_scatter");
  });
}

// ---- Bad input -----------------------------------------------------------------------------------------------------

TEST(ParallelFunctionsTest, TensorsThatDoNotFitAreErrors) {
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { gather_from_group(torch::ones({2, 3}), 1, rank, 5); }), Refused());
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { scatter_to_group(torch::ones({2, 3}), 2, rank); }), Refused());
}

}  // namespace parallel_functions_test
}  // namespace lockstep
