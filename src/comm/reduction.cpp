#include "comm/reduction.hpp"

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <lockstep/error.hpp>

namespace lockstep::comm {

using c10d::ReduceOp;

namespace {

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

}  // namespace

std::string name_of(const ReduceOp& op) {
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

at::Tensor reduce_in_order(const std::vector<at::Tensor>& values, ReduceOp::RedOpType op, const c10::Device& device,
                           bool overwrite_first) {
  at::Tensor sum = overwrite_first && values[0].device() == device
                       ? values[0]
                       : values[0].to(device, values[0].scalar_type(), /*non_blocking=*/true, /*copy=*/true);
  for (size_t rank = 1; rank < values.size(); ++rank) combine(sum, values[rank], op);
  if (op == ReduceOp::AVG) sum.div_(static_cast<double>(values.size()));
  return sum;
}

}  // namespace lockstep::comm
