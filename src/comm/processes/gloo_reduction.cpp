#include "gloo_reduction.hpp"

#include <lockstep/base/error.hpp>

#include <vector>

namespace lockstep::comm {
namespace {

using c10d::ReduceOp;

// The type in which Gloo reduces values of `type`.
at::ScalarType gloo_type(at::ScalarType type) {
  switch (type) {
    case at::kShort:
    case at::kBool:
      return at::kInt;
    default:
      return type;
  }
}

// Sums of complex numbers are sums of their parts; their products are not.
at::Tensor as_real(const at::Tensor& flat, ReduceOp::RedOpType op) {
  if (!flat.is_complex()) return flat;
  if (op != ReduceOp::SUM && op != ReduceOp::AVG) {
    throw Error("between processes, complex numbers can be summed and averaged only");
  }
  return at::view_as_real(flat).view({-1});
}

}  // namespace

Pending start_barrier(c10d::Backend& group) {
  c10d::BarrierOptions options;
  options.timeout = kUntilItComes;
  return {group.barrier(options)};
}

Pending start_allreduce(c10d::Backend& group, const at::Tensor& flat, ReduceOp::RedOpType op, int ranks) {
  if (flat.numel() == 0) return start_barrier(group);
  const at::Tensor values = as_real(flat, op);
  const at::Tensor buffer = values.to(gloo_type(values.scalar_type()));  // the same tensor if the type is
  c10d::AllreduceOptions options;
  options.reduceOp = op == ReduceOp::AVG ? ReduceOp::SUM : op;
  options.timeout = kUntilItComes;
  std::vector<at::Tensor> tensors{buffer};
  return {group.allreduce(tensors, options), [values, buffer, op, ranks] {
            if (op == ReduceOp::AVG) buffer.div_(static_cast<double>(ranks));
            if (!buffer.is_same(values)) values.copy_(buffer);
          }};
}

}  // namespace lockstep::comm
