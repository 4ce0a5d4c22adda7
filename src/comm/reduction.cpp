#include "reduction.hpp"

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>

#include "base/classic.hpp"

namespace lockstep::comm {

using c10d::ReduceOp;

at::Tensor in_a_row(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj()) return tensor;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

at::Tensor slice(const at::Tensor& tensor, const Range& part) {
  return tensor.view({-1}).narrow(0, part.begin, part.size());
}

namespace {

// ---- Through LibTorch: every type, every reduction, every device.

void combine(at::Tensor& sum, const at::Tensor& value, ReduceOp::RedOpType op) {
  const at::Tensor here = value.to(sum.device(), /*non_blocking=*/true);
  switch (op) {
    case ReduceOp::PRODUCT:
      sum.mul_(here);
      break;
    case ReduceOp::MIN:
      at::minimum_out(sum, sum, here);
      break;
    case ReduceOp::MAX:
      at::maximum_out(sum, sum, here);
      break;
    default:
      sum.add_(here);
  }
}

// The sum may begin in place with the value at `home` if that is among the first two: a + b has the bits of b + a.
void reduce_tensors(TensorPointers values, ReduceOp::RedOpType op, TensorPointers targets, const Range& part,
                    size_t home) {
  const bool in_place = targets[home] == values[home] && home < 2 && home < values.size();
  const size_t begin = in_place ? home : 0;
  const at::Tensor first = slice(*values[begin], part);
  at::Tensor sum =
      in_place ? first : first.to(targets[home]->device(), first.scalar_type(), /*non_blocking=*/true, /*copy=*/true);
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (rank != begin) combine(sum, slice(*values[rank], part), op);
  }
  if (op == ReduceOp::AVG && values.size() > 1) sum.div_(static_cast<double>(values.size()));
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!in_place || i != home) slice(*targets[i], part).copy_(sum, /*non_blocking=*/true);
  }
}

void average_tensors(TensorPointers values, const TreeAverage& average, TensorPointers targets, const Range& part,
                     int64_t to, size_t home) {
  const auto here = [device = targets[home]->device()](const at::Tensor& tensor) {
    return tensor.to(device, /*non_blocking=*/true);
  };
  std::vector<at::Tensor> sums;
  for (const auto* value : values) sums.push_back(slice(*value, part));
  for (const auto& [into, from] : average.additions) {
    sums[into] = here(sums[into]);
    sums[into].add_(here(sums[from]));
  }
  const at::Tensor sum = here(sums[0]).div_(average.divisor).add_(0.0);
  for (const auto* target : targets) {
    const at::Tensor there = slice(*target, {to, to + part.size()});
    if (there.const_data_ptr() != sum.const_data_ptr()) there.copy_(sum, /*non_blocking=*/true);
  }
}

// ---- Sums and averages in the CPU's memory.

// The bytes that are added up in the first-level cache before their sum is written to all targets.
constexpr int64_t kBlockBytes = 4096;

struct Sum {
  at::ArrayRef<Addition> additions;
  double divisor = 1;
  bool adds_zero = false;
};

// The product with the inverse of a power of two has the quotient's bits, and takes less time.
template <class Scalar>
void divide(Scalar* values, int64_t count, Scalar divisor) {
  int exponent = 0;
  if (std::frexp(divisor, &exponent) == Scalar{0.5}) {
    const Scalar factor = 1 / divisor;
    for (int64_t i = 0; i < count; ++i) values[i] *= factor;
  } else {
    for (int64_t i = 0; i < count; ++i) values[i] /= divisor;
  }
}

// Each row that becomes a sum gets a block of memory for it.
template <class Scalar>
void add_blocks(TensorPointers values, const Sum& sum, TensorPointers targets, const Range& part, int64_t to) {
  const int64_t block = std::min<int64_t>(kBlockBytes / sizeof(Scalar), part.size());
  c10::SmallVector<bool, 8> becomes_sum(values.size(), false);
  becomes_sum[0] = true;
  for (const auto& addition : sum.additions) becomes_sum[addition.into] = true;
  const std::unique_ptr<Scalar[]> memory(new Scalar[block * std::count(becomes_sum.begin(), becomes_sum.end(), true)]);
  c10::SmallVector<const Scalar*, 8> rows;
  c10::SmallVector<Scalar*, 8> sums, results;
  Scalar* next = memory.get();
  for (size_t row = 0; row < values.size(); ++row) {
    rows.push_back(values[row]->const_data_ptr<Scalar>());
    sums.push_back(next);
    if (becomes_sum[row]) next += block;
  }
  for (const auto* target : targets) results.push_back(target->mutable_data_ptr<Scalar>() + to - part.begin);
  const auto divisor = static_cast<Scalar>(sum.divisor);

  c10::SmallVector<const Scalar*, 8> now(values.size());  // the place of each row's block
  for (int64_t begin = part.begin; begin < part.end; begin += block) {
    const int64_t size = std::min(block, part.end - begin);
    for (size_t row = 0; row < rows.size(); ++row) now[row] = rows[row] + begin;
    for (const auto& [into, from] : sum.additions) {
      Scalar* const to_sum = sums[into];
      const Scalar *const left = now[into], *const right = now[from];
      if (left == to_sum) {
        for (int64_t i = 0; i < size; ++i) to_sum[i] += right[i];
      } else {
        for (int64_t i = 0; i < size; ++i) to_sum[i] = left[i] + right[i];
      }
      now[into] = to_sum;
    }
    Scalar* const result = sums[0];
    if (now[0] != result) std::copy_n(now[0], size, result);
    if (divisor != 1) divide(result, size, divisor);
    if (sum.adds_zero) {
      for (int64_t i = 0; i < size; ++i) result[i] += Scalar{0};
    }
    for (Scalar* target : results) std::copy_n(result, size, target + begin);
  }
}

// Gives false if LibTorch has to add instead.
bool add_in_blocks(TensorPointers values, const Sum& sum, TensorPointers targets, const Range& part, int64_t to) {
  const at::Tensor& first = *values[0];
  if (part.size() == 0) return true;
  if (first.is_cpu() && first.scalar_type() == at::kFloat) {
    add_blocks<float>(values, sum, targets, part, to);
  } else if (first.is_cpu() && first.scalar_type() == at::kDouble) {
    add_blocks<double>(values, sum, targets, part, to);
  } else {
    return false;
  }
  return true;
}

}  // namespace

// c10d numbers its reductions in the order of the names below. Those that are offered come first.
static_assert(ReduceOp::SUM == 0 && ReduceOp::MAX == 4 && ReduceOp::PREMUL_SUM == 8);

std::string name_of(ReduceOp::RedOpType op) {
  constexpr const char* names[] = {"sum",        "avg",         "product",         "min", "max", "bitwise and",
                                   "bitwise or", "bitwise xor", "sum of multiples"};
  return names[std::min<size_t>(op, std::size(names) - 1)];
}

bool is_offered(ReduceOp::RedOpType op) {
  return op <= ReduceOp::MAX;
}

std::string describe(at::ScalarType type, at::IntArrayRef sizes) {
  if (type == at::kChar) return classic_text("int8 ", sizes);   // C++ says "signed char",
  if (type == at::kByte) return classic_text("uint8 ", sizes);  // "unsigned char"
  return classic_text(caffe2::TypeMeta::fromScalarType(type).name(), " ", sizes);
}

void reduce(TensorPointers values, ReduceOp::RedOpType op, TensorPointers targets, const Range& part, size_t home) {
  if (op == ReduceOp::SUM || op == ReduceOp::AVG) {
    c10::SmallVector<Addition, 8> one_by_one;
    for (size_t row = 1; row < values.size(); ++row) one_by_one.push_back({.into = 0, .from = row});
    const double divisor = op == ReduceOp::AVG ? static_cast<double>(values.size()) : 1;
    if (add_in_blocks(values, {one_by_one, divisor}, targets, part, part.begin)) return;
  }
  reduce_tensors(values, op, targets, part, home);
}

void average_in_tree(TensorPointers values, const TreeAverage& average, TensorPointers targets, const Range& part,
                     int64_t to, size_t home) {
  const Sum sum{average.additions, average.divisor, /*adds_zero=*/true};
  if (!add_in_blocks(values, sum, targets, part, to)) average_tensors(values, average, targets, part, to, home);
}

bool add_from_the_last(TensorPointers values, const at::Tensor& target) {
  const auto alike = [&](const at::Tensor* value) {
    return value->device() == target.device() && value->scalar_type() == target.scalar_type() &&
           value->sizes() == target.sizes() && value->strides() == target.strides() && !value->is_neg();
  };
  if (!target.is_non_overlapping_and_dense() || target.is_neg() || !std::all_of(values.begin(), values.end(), alike))
    return false;
  c10::SmallVector<Addition, 8> additions;
  for (size_t row = values.size(); row-- > 1;) additions.push_back({.into = row - 1, .from = row});
  return add_in_blocks(values, {additions}, {&target}, {0, target.numel()}, 0);
}

}  // namespace lockstep::comm
