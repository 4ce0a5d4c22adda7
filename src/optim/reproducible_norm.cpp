#include "reproducible_norm.hpp"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

#include "finite_sum.hpp"

namespace lockstep {
namespace {

using at::Tensor;

// The numbers below follow from these facts. Scaled values are below 4, so their squares are below 16 = 2^4. A row has
// 2^13 values. So a row's sum is at most 2^17, and exact in float64 if all squares are multiples of 2^17 * 2^-53 =
// 2^-36. Then at most half of that is cut off of each square: the second sum is at most 2^-24, exact for multiples of
// 2^-77.
//
// The sums of many rows would not be exact any more. So each sum is split again, into multiples of 2^26 times the unit
// and the rest. Both add exactly over 2^26 rows.
constexpr int64_t kRow = 1 << 13;

// Rounds numbers below 2^(k - 1) to a multiple of 2^(k - 52), by adding and subtracting 1.5 * 2^k.
struct RoundingBy {
  double of_squares, of_rows;
};
constexpr RoundingBy kCoarse{0x1.8p16, 0x1.8p42}, kFine{0x1.8p-25, 0x1.8p1};

// Gives the largest power of two in `largest`, as far as its inverse is normal. Takes the exponent's bits alone.
Tensor power_of_two_in(const Tensor& largest) {
  return largest[0].view(at::kLong).bitwise_and(0x7ff0000000000000).view(at::kDouble).clamp(0x1p-1000, 0x1p1022);
}

// Gives a slice's values, in the order of its memory if that saves a copy.
Tensor flat_in_any_order(const Tensor& given) {
  const Tensor slice = real_values(given);
  return slice.is_non_overlapping_and_dense() ? slice.as_strided({slice.numel()}, {1}) : slice.contiguous().view(-1);
}

// Gives the rounded sum, and the rounding error: both depend on the exact sum alone (Knuth's TwoSum).
std::pair<Tensor, Tensor> sum_and_error(const Tensor& a, const Tensor& b) {
  const Tensor sum = a + b, of_b = sum - a;
  return {sum, (a - (sum - of_b)) + (b - of_b)};
}

// ---- By a loop over float32 or float64 in the CPU's memory

using Sums = std::array<double, 4>;
constexpr int64_t kSquareLanes = 8;  // sums side by side, which the compiler makes into vectors

double rounded(double value, double rounding) {
  return (value + rounding) - rounding;
}

void add_row(double row, double rounding, double* sums) {
  const double high = rounded(row, rounding);
  sums[0] += high;
  sums[1] += row - high;
}

// Has two statements: some compilers would make one operation of a product and a sum in one expression, others two.
template <class Real>
void add_squares(const Real* values, double scale, double* coarse, double* fine) {
  for (int64_t lane = 0; lane < kSquareLanes; ++lane) {
    const double scaled = static_cast<double>(values[lane]) * scale;
    const double square = scaled * scaled;
    const double high = rounded(square, kCoarse.of_squares);
    coarse[lane] += high;
    fine[lane] += rounded(square - high, kFine.of_squares);
  }
}

// Adds at most kRow values.
template <class Real>
void add_squares(const Real* values, int64_t count, double scale, Sums& sums) {
  double coarse[kSquareLanes] = {}, fine[kSquareLanes] = {};
  for (; count >= kSquareLanes; count -= kSquareLanes, values += kSquareLanes) add_squares(values, scale, coarse, fine);
  Real rest[kSquareLanes] = {};
  std::copy_n(values, count, rest);
  add_squares(rest, scale, coarse, fine);
  add_row(std::accumulate(std::begin(coarse), std::end(coarse), 0.0), kCoarse.of_rows, &sums[0]);
  add_row(std::accumulate(std::begin(fine), std::end(fine), 0.0), kFine.of_rows, &sums[2]);
}

template <class Real>
Sums sums_of(const Tensor& values, double scale) {
  const Real* const first = values.const_data_ptr<Real>();
  return at::parallel_reduce(
      0, values.numel(), /*grain_size=*/8 * kRow, Sums{},
      [&](int64_t begin, int64_t end, Sums sums) {
        for (; begin < end; begin += kRow) add_squares(first + begin, std::min(kRow, end - begin), scale, sums);
        return sums;
      },
      [](Sums a, const Sums& b) {
        for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
        return a;
      });
}

// ---- By operators

constexpr int64_t kRowsAtATime = 512;  // 32 MiB, so that an operation is worth its call

Tensor rounded(const Tensor& values, double rounding) {
  return (values + rounding).sub_(rounding);
}

// Gathers values until they fill the rows.
class SquareSum {
 public:
  SquareSum(const Tensor& largest, int64_t values)
      : scale_(power_of_two_in(largest).reciprocal()), sums_(at::zeros({4}, largest.options())) {
    gathered_ = at::empty({std::min((values + kRow - 1) / kRow, kRowsAtATime), kRow}, largest.options());
  }

  void add(const Tensor& slice) {
    const Tensor values = flat_in_any_order(slice);
    for (int64_t done = 0; done < values.numel();) {
      const int64_t count = std::min(values.numel() - done, gathered_.numel() - count_);
      gathered_.view(-1).narrow(0, count_, count).copy_(values.narrow(0, done, count));
      done += count;
      count_ += count;
      if (count_ == gathered_.numel()) add_gathered();
    }
  }

  Tensor result() {
    add_gathered();
    return sums_;
  }

 private:
  void add_gathered() {
    if (count_ == 0) return;
    const int64_t rows = (count_ + kRow - 1) / kRow;
    gathered_.view(-1).narrow(0, count_, rows * kRow - count_).zero_();
    count_ = 0;
    const Tensor squares = gathered_.narrow(0, 0, rows).mul_(scale_).square_();
    const Tensor coarse = rounded(squares, kCoarse.of_squares);
    add_rows(coarse.sum(1), kCoarse.of_rows, 0);
    add_rows(rounded(squares.sub_(coarse), kFine.of_squares).sum(1), kFine.of_rows, 2);
  }

  void add_rows(const Tensor& rows, double rounding, int64_t place) {
    const Tensor high = rounded(rows, rounding);
    sums_[place].add_(high.sum());
    sums_[place + 1].add_((rows - high).sum());
  }

  const Tensor scale_, sums_;
  Tensor gathered_;
  int64_t count_ = 0;  // the number of values in gathered_
};

}  // namespace

Tensor largest_magnitude(const std::vector<Tensor>& slices, const c10::Device& device) {
  const c10::NoGradGuard no_grad;
  std::vector<Tensor> extremes;
  for (const auto& slice : slices) {
    if (slice.numel() == 0) continue;
    const auto [least, greatest] = at::aminmax(real_values(slice));
    extremes.insert(extremes.end(), {least, greatest});
  }
  const auto type = at::TensorOptions(device).dtype(at::kDouble);
  if (extremes.empty()) return at::zeros({2}, type);
  const Tensor all = at::stack(extremes).to(at::kDouble).abs().amax();  // NaN if one is NaN
  const Tensor beyond = all.isinf().to(at::kDouble) + all.isnan().to(at::kDouble) * 2;
  return at::stack({at::where(beyond == 0, all, 0), beyond});
}

Tensor sums_of_squares(const std::vector<Tensor>& slices, const Tensor& largest) {
  if (!largest.is_cpu()) return sums_by_operators(slices, largest);
  const c10::NoGradGuard no_grad;
  const double scale = 1 / power_of_two_in(largest).item<double>();
  const Tensor sums = at::zeros({4}, at::kDouble);
  for (const auto& slice : slices) {
    const Tensor flat = flat_in_any_order(slice);
    const bool wide = flat.scalar_type() == at::kDouble;
    const Tensor values = flat.to(wide ? at::kDouble : at::kFloat);
    const Sums own = wide ? sums_of<double>(values, scale) : sums_of<float>(values, scale);
    for (size_t i = 0; i < own.size(); ++i) sums.mutable_data_ptr<double>()[i] += own[i];
  }
  return sums;
}

Tensor sums_by_operators(const std::vector<Tensor>& slices, const Tensor& largest) {
  const c10::NoGradGuard no_grad;
  int64_t values = 0;
  for (const auto& slice : slices) values += slice.numel();
  SquareSum sum(largest, values);
  for (const auto& slice : slices) sum.add(slice);
  return sum.result();
}

Tensor norm_of(const Tensor& sums, const Tensor& largest) {
  const c10::NoGradGuard no_grad;
  const auto [coarse, coarse_error] = sum_and_error(sums[0], sums[1]);
  const auto [fine, fine_error] = sum_and_error(sums[2], sums[3]);
  const Tensor norm = (coarse + (fine + (coarse_error + fine_error))).sqrt() * power_of_two_in(largest);
  const Tensor beyond = largest[1];
  const Tensor finite_or_infinite = at::where(beyond == 0, norm, std::numeric_limits<double>::infinity());
  return at::where(beyond == 2, std::numeric_limits<double>::quiet_NaN(), finite_or_infinite);
}

}  // namespace lockstep
