#include "gloo_reduction.hpp"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace lockstep::comm {
namespace {

using c10d::ReduceOp;

// Gives the type in which Gloo reduces values of `type`.
at::ScalarType gloo_type(at::ScalarType type) {
  switch (type) {
    case at::kShort:
    case at::kBool:
      return at::kInt;
    default:
      return type;
  }
}

// Gloo's smallest and largest of floating-point numbers lose a NaN. So Gloo gets integers in the numbers' order
// instead, in which a NaN comes before all numbers, or after all.
struct InOrder {
  at::Tensor largest;  // the largest of the integers

  // Turns a number's bits into its integer, and back. Below 0 the order of the bits is reversed.
  at::Tensor turned(const at::Tensor& bits) const { return bits.bitwise_xor(bits.lt(0).mul(largest)); }

  at::Tensor integers(const at::Tensor& numbers, bool nan_is_largest) const {
    const at::Tensor nan = nan_is_largest ? largest : largest.bitwise_not();
    return at::where(numbers.isnan(), nan, turned(numbers.view(largest.scalar_type())));
  }
};

Pending start_in_order(c10d::Backend& group, const at::Tensor& values, const c10d::AllreduceOptions& options) {
  const at::Tensor numbers = values.to(values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const InOrder order{numbers.scalar_type() == at::kDouble
                          ? at::scalar_tensor(std::numeric_limits<int64_t>::max(), at::kLong)
                          : at::scalar_tensor(std::numeric_limits<int32_t>::max(), at::kInt)};
  const at::Tensor integers = order.integers(numbers, options.reduceOp == ReduceOp::MAX);
  std::vector<at::Tensor> tensors{integers};
  return {group.allreduce(tensors, options), [=] { values.copy_(order.turned(integers).view(numbers.scalar_type())); }};
}

}  // namespace

Pending start_barrier(c10d::Backend& group) {
  c10d::BarrierOptions options;
  options.timeout = kUntilItComes;
  return {group.barrier(options)};
}

bool reduces(at::ScalarType type, ReduceOp::RedOpType op) {
  switch (gloo_type(type)) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    case at::kComplexFloat:  // sums of complex numbers are sums of their parts; their products are not
    case at::kComplexDouble:
      return op == ReduceOp::SUM || op == ReduceOp::AVG;
    default:
      return false;
  }
}

Pending start_allreduce(c10d::Backend& group, const at::Tensor& flat, ReduceOp::RedOpType op) {
  if (flat.numel() == 0) return start_barrier(group);
  c10d::AllreduceOptions options;
  options.reduceOp = op == ReduceOp::AVG ? ReduceOp::SUM : op;
  options.timeout = kUntilItComes;
  if (flat.is_floating_point() && (op == ReduceOp::MIN || op == ReduceOp::MAX)) {
    return start_in_order(group, flat, options);
  }
  const at::Tensor values = flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
  const at::Tensor buffer = values.to(gloo_type(values.scalar_type()));  // the same tensor if the type is the same
  std::vector<at::Tensor> tensors{buffer};
  return {group.allreduce(tensors, options), [values, buffer, op, ranks = group.getSize()] {
            if (op == ReduceOp::AVG) buffer.div_(static_cast<double>(ranks));
            if (!buffer.is_same(values)) values.copy_(buffer);
          }};
}

}  // namespace lockstep::comm
