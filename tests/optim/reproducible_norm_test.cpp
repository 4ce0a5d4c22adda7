// Labels: arithmetic
// The reproducible norm: the same bits for any cutting and order, and as exact as a sum in higher precision.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim/reproducible_norm.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace reproducible_norm_test {

using namespace lockstep;
using torch::Tensor;
using Pieces = std::vector<Tensor>;
const double kInfinity = std::numeric_limits<double>::infinity();
const double kNaN = std::numeric_limits<double>::quiet_NaN();

// Gives what ranks with these pieces agree on. Every other one computes as on a GPU.
double norm_of_ranks(const std::vector<Pieces>& ranks, bool operators_first = false) {
  Tensor largest = torch::zeros({2}, torch::kDouble), sums = torch::zeros({4}, torch::kDouble);
  for (const auto& pieces : ranks) largest = torch::maximum(largest, largest_magnitude(pieces, torch::kCPU));
  bool operators = operators_first;
  for (const auto& pieces : ranks) {
    sums += operators ? sums_by_operators(pieces, largest) : sums_of_squares(pieces, largest);
    operators = !operators;
  }
  const Tensor norm = norm_of(sums, largest);
  EXPECT_EQ(norm.scalar_type(), torch::kDouble);
  EXPECT_EQ(norm.dim(), 0);
  return norm.item<double>();
}

// Adds what additions round away (Neumaier 1974), in long double: some 2^-120 of the sum of squares is lost.
double exact_norm(const Tensor& values) {
  const Tensor all = values.to(torch::kDouble).contiguous();
  long double sum = 0, lost = 0;
  for (int64_t i = 0; i < all.numel(); ++i) {
    const long double value = all.data_ptr<double>()[i], square = value * value, next = sum + square;
    lost += std::abs(sum) >= square ? (sum - next) + square : (square - next) + sum;
    sum = next;
  }
  return static_cast<double>(std::sqrt(sum + lost));
}

// Values of both signs, with magnitudes over `binary_digits` powers of two.
Tensor values_of(int64_t count, double binary_digits, torch::ScalarType type) {
  const Tensor magnitudes = (torch::rand({count}, torch::kDouble) - 0.5) * binary_digits;
  return (torch::randn({count}, torch::kDouble) * magnitudes.exp2()).to(type);
}

// The values in another order, in pieces of any size, over some ranks; some have none.
std::vector<Pieces> shuffled_and_cut(const Tensor& values, std::mt19937& random) {
  const Tensor shuffled = values.index_select(0, torch::randperm(values.numel()));
  std::vector<Pieces> ranks(1 + random() % 4);
  for (int64_t begin = 0; begin < values.numel();) {
    const int64_t size = std::min<int64_t>(random() % (1 + random() % 30000), values.numel() - begin);
    ranks[random() % ranks.size()].push_back(shuffled.narrow(0, begin, size));
    begin += size;
  }
  for (auto& pieces : ranks) std::shuffle(pieces.begin(), pieces.end(), random);
  return ranks;
}

TEST(ReproducibleNorm, OfComplexValuesIsThatOfTheirParts) {
  torch::manual_seed(1);
  for (const auto type : {torch::kComplexFloat, torch::kComplexDouble}) {
    const Tensor z = torch::randn({300, 100}, type);
    const double norm = norm_of_ranks({Pieces{z}});
    EXPECT_NEAR(norm, torch::linalg_vector_norm(z.to(torch::kComplexDouble)).item<double>(), 1e-12 * norm);
    EXPECT_EQ(norm, norm_of_ranks({Pieces{z.narrow(0, 0, 7)}, Pieces{torch::conj(z.narrow(0, 7, 293)).t()}}));
    EXPECT_FALSE(std::isfinite(norm_of_ranks({Pieces{z / 0}})));
  }
}

TEST(ReproducibleNorm, HasTheSameBitsForAnyCuttingAndOrder) {
  for (int seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    torch::manual_seed(seed);
    std::mt19937 random(seed);
    const auto type = seed % 2 == 0 ? torch::kDouble : torch::kFloat;
    const Tensor values = values_of(random() % 200000, (seed % 5) * 15, type);
    const double norm = norm_of_ranks({{values}});
    for (int time = 0; time < 3; ++time) EXPECT_EQ(norm_of_ranks(shuffled_and_cut(values, random)), norm);
    EXPECT_EQ(norm_of_ranks({{values}}, /*operators_first=*/true), norm);
    const double exact = exact_norm(values);
    EXPECT_NEAR(norm, exact, exact * 3e-16);
  }
}

// More than the operators take at a time.
TEST(ReproducibleNorm, OfManyValuesHasTheSameBits) {
  torch::manual_seed(9);
  const Tensor values = torch::randn({9000001});
  const double norm = norm_of_ranks({{values}});
  EXPECT_EQ(norm_of_ranks({{values}}, /*operators_first=*/true), norm);
  EXPECT_EQ(norm_of_ranks({{values.narrow(0, 0, 123)}, {values.narrow(0, 123, 8999878)}}), norm);
  EXPECT_NEAR(norm, exact_norm(values), norm * 3e-16);
}

// Parts of the sum of squares lie apart, and are the same sum. The last addition is all but a tie, and what decides it
// must not be rounded away before.
TEST(ReproducibleNorm, DoesNotDependOnWhereThePartsOfTheSumLie) {
  const auto values = [](int64_t count, double value) { return torch::full({count}, value, torch::kDouble); };
  for (int64_t count = 1 << 15; count < (1 << 15) + 50; ++count) {
    const Tensor ones = values(count, 1), tie = values(1, 0x1p-19), small = values(1, 0x1p-35),
                 part = values(1, 0x1p-6);
    const double norm = norm_of_ranks({{ones, values(4, 0x1p-6), tie, small}});
    EXPECT_EQ(norm_of_ranks({{ones, part, part, part, part, tie, small}}), norm) << count;
  }
}

// One large value and many small ones, each of which would be rounded away by itself.
TEST(ReproducibleNorm, SeesManySmallValuesBesideALargeOne) {
  for (const double small : {1e-8, 3e-9, 7e-10}) {
    const Tensor values = torch::full({1000000}, small, torch::kDouble);
    values[345678] = 1;
    const double exact = exact_norm(values);
    EXPECT_GT(exact, 1);
    EXPECT_NEAR(norm_of_ranks({{values}}), exact, 3e-16) << small;
  }
}

TEST(ReproducibleNorm, OfNothingAndOfZerosIsZero) {
  EXPECT_EQ(norm_of_ranks({{}}), 0);
  EXPECT_EQ(norm_of_ranks({{torch::zeros({0})}, {}}), 0);
  EXPECT_EQ(norm_of_ranks({{torch::zeros({3, 2})}, {torch::zeros({}, torch::kDouble)}}), 0);
}

TEST(ReproducibleNorm, IsRightAtTheEndsOfTheNumbers) {
  for (const double scale : {0x1p-149, 0x1p-126, 0x1p-60, 1.0, 0x1p100, 0x1p125}) {
    EXPECT_EQ(norm_of_ranks({{torch::tensor({3.f}) * scale}, {torch::tensor({-4.f}) * scale}}), 5 * std::abs(scale));
  }
  for (const double scale : {0x1p-1030, 0x1p-1022, 0x1p-1001, 0x1p-999, 0x1p-500, 0x1p510, 0x1p1020, 0x1p1021}) {
    const Tensor values = torch::tensor({3., -4.}, torch::kDouble) * scale;
    EXPECT_EQ(norm_of_ranks({{values}}), 5 * scale) << scale;
  }
  const double largest = std::numeric_limits<double>::max();
  EXPECT_EQ(norm_of_ranks({{torch::tensor({largest}, torch::kDouble)}}), largest);
  EXPECT_EQ(norm_of_ranks({{torch::tensor({largest, largest}, torch::kDouble)}}), kInfinity);
}

TEST(ReproducibleNorm, SaysWhatIsNotFinite) {
  const Tensor one = torch::ones({3}), infinite = torch::tensor({1.0, -kInfinity}), nan = torch::tensor({kNaN, 1.0});
  EXPECT_EQ(norm_of_ranks({{one}, {infinite}}), kInfinity);
  EXPECT_EQ(norm_of_ranks({{infinite, one}}), kInfinity);
  EXPECT_TRUE(std::isnan(norm_of_ranks({{one}, {nan}})));
  EXPECT_TRUE(std::isnan(norm_of_ranks({{infinite}, {nan}, {one}})));
  EXPECT_TRUE(std::isnan(norm_of_ranks({{nan, infinite}})));
  EXPECT_TRUE(std::isnan(norm_of_ranks({{torch::tensor({kInfinity, kNaN, 1.0})}})));
}

TEST(ReproducibleNorm, TakesAnyTypeAndLayout) {
  torch::manual_seed(5);
  for (const auto type : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    const Tensor values = (torch::randn({6, 5, 4, 3}) * 100).to(type);
    const double exact = exact_norm(values), norm = norm_of_ranks({{values}});
    EXPECT_NEAR(norm, exact, exact * 3e-16) << type;
    EXPECT_EQ(norm_of_ranks({{values.to(torch::MemoryFormat::ChannelsLast)}}), norm) << type;
    EXPECT_EQ(norm_of_ranks({{values.transpose(0, 2)}}), norm) << type;
    EXPECT_EQ(norm_of_ranks({{values.narrow(3, 0, 1), values.narrow(3, 1, 2)}}), norm) << type;
    EXPECT_EQ(norm_of_ranks({{values.narrow(0, 0, 1).to(torch::kDouble), values.narrow(0, 1, 5)}}), norm) << type;
  }
  EXPECT_EQ(norm_of_ranks({{torch::full({9}, 2.f).expand({4, 9})}}), 12);
  EXPECT_EQ(norm_of_ranks({{torch::full({}, -2.f)}}), 2);
}

TEST(ReproducibleNorm, LeavesThePiecesAlone) {
  torch::manual_seed(6);
  for (const bool operators : {false, true}) {
    const Tensor values = torch::randn({150001}, torch::TensorOptions(torch::kDouble).requires_grad(true));
    const Tensor before = values.detach().clone();
    norm_of_ranks({{values}}, operators);
    EXPECT_TRUE(values.equal(before));
  }
}

}  // namespace reproducible_norm_test
