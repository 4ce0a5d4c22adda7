#include "reduction.hpp"

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cstring>

namespace lockstep::comm {

using c10d::ReduceOp;

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

// In place the sum begins with the value at `home`, if that is one of the first two: a + b and b + a are the same bits.
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
  if (op == ReduceOp::AVG) sum.div_(static_cast<double>(values.size()));
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!in_place || i != home) slice(*targets[i], part).copy_(sum, /*non_blocking=*/true);
  }
}

// ---- Sums and averages in the CPU's memory.

// Elements that are added up in the first-level cache before the sum is written to all targets.
constexpr int64_t kBlockBytes = 4096;

template <class Scalar>
void add_blocks(TensorPointers values, bool average, TensorPointers targets, const Range& part) {
  constexpr int64_t block = kBlockBytes / sizeof(Scalar);
  c10::SmallVector<const Scalar*, 8> from;
  c10::SmallVector<Scalar*, 8> to;
  for (const auto* value : values) from.push_back(value->const_data_ptr<Scalar>());
  for (const auto* target : targets) to.push_back(target->mutable_data_ptr<Scalar>());
  const auto count = static_cast<Scalar>(values.size());

  Scalar sum[block];
  for (int64_t begin = part.begin; begin < part.end; begin += block) {
    const int64_t size = std::min(block, part.end - begin);
    if (from.size() == 1) {
      std::copy_n(from[0] + begin, size, sum);
    } else {
      for (int64_t i = 0; i < size; ++i) sum[i] = from[0][begin + i] + from[1][begin + i];
    }
    for (size_t rank = 2; rank < from.size(); ++rank) {
      for (int64_t i = 0; i < size; ++i) sum[i] += from[rank][begin + i];
    }
    if (average) {
      for (int64_t i = 0; i < size; ++i) sum[i] /= count;
    }
    for (Scalar* target : to) std::copy_n(sum, size, target + begin);
  }
}

}  // namespace

std::string name_of(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM:
      return "sum";
    case ReduceOp::AVG:
      return "avg";
    case ReduceOp::PRODUCT:
      return "product";
    case ReduceOp::MIN:
      return "min";
    case ReduceOp::MAX:
      return "max";
    default:
      throw Error("the reduction must be sum, avg, product, min or max");
  }
}

std::string describe(at::ScalarType type, at::IntArrayRef sizes) {
  return c10::str(caffe2::TypeMeta::fromScalarType(type).name(), " ", sizes);
}

void reduce(TensorPointers values, ReduceOp::RedOpType op, TensorPointers targets, const Range& part, size_t home) {
  const bool adds = op == ReduceOp::SUM || op == ReduceOp::AVG;
  const at::Tensor& first = *values[0];
  if (first.is_cpu() && adds && first.scalar_type() == at::kFloat) {
    add_blocks<float>(values, op == ReduceOp::AVG, targets, part);
  } else if (first.is_cpu() && adds && first.scalar_type() == at::kDouble) {
    add_blocks<double>(values, op == ReduceOp::AVG, targets, part);
  } else {
    reduce_tensors(values, op, targets, part, home);
  }
}

}  // namespace lockstep::comm
