#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>
#include <lockstep/base/error.hpp>
#include <lockstep/tensor_parallel/parallel_functions.hpp>

#include <limits>
#include <string>

#include "base/classic.hpp"
#include "group_sizes.hpp"

namespace lockstep {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const Tensor& logits, const Tensor& targets) {
  const bool fit = logits.defined() && logits.dim() == 2 && logits.size(1) > 0 && logits.is_floating_point() &&
                   targets.defined() && targets.dim() == 1 && targets.size(0) == logits.size(0) &&
                   targets.scalar_type() == at::kLong;
  if (fit) return;
  const auto text = [](const Tensor& tensor) {
    return tensor.defined() ? classic_text(tensor.scalar_type(), " ", tensor.sizes()) : std::string("undefined");
  };
  throw Error(
      "parallel_cross_entropy: local_logits must be [n, this rank's classes], at least one class, of a "
      "floating-point type, and targets [n] of int64; these are " +
      text(logits) + " and " + text(targets));
}

void check_on_cpu(const Tensor& targets, int64_t classes) {
  if (!targets.is_cpu() || targets.numel() == 0) return;
  const auto lowest = targets.min().item<int64_t>(), highest = targets.max().item<int64_t>();
  if (lowest >= 0 && highest < classes) return;
  throw Error("parallel_cross_entropy: targets go from " + std::to_string(lowest) + " to " + std::to_string(highest) +
              ", but the " + std::to_string(classes) + " classes of all ranks from 0 to " +
              std::to_string(classes - 1));
}

struct Classes {
  int64_t begin, count;  // this rank's classes
  int64_t total;
};

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& local_logits, const Tensor& targets, Classes classes,
                        Rank rank) {
    const bool narrow = local_logits.scalar_type() == at::kHalf || local_logits.scalar_type() == at::kBFloat16;
    const Tensor logits = narrow ? local_logits.to(at::kFloat) : local_logits;
    const Tensor largest = logits.amax(1);
    rank.allreduce(largest, c10d::ReduceOp::MAX);
    const Tensor shifted = logits - largest.unsqueeze(1);
    const Tensor exponentials = shifted.exp();

    const Tensor column = targets - classes.begin;
    const Tensor is_here = (column >= 0).logical_and(column < classes.count);
    const Tensor safe_column = at::where(is_here, column, at::scalar_tensor(0, column.options())).unsqueeze(1);
    const Tensor found = shifted.gather(1, safe_column).squeeze(1);
    const Tensor zero = at::scalar_tensor(0, found.options());
    const Tensor sums = at::stack({exponentials.sum(1), at::where(is_here, found, zero)});
    rank.allreduce(sums);

    const Tensor sample_losses = sums[0].log() - sums[1];
    const Tensor is_class = (targets >= 0).logical_and(targets < classes.total);
    const Tensor nan = at::scalar_tensor(std::numeric_limits<double>::quiet_NaN(), sample_losses.options());
    ctx->save_for_backward({exponentials.div_(sums[0].unsqueeze(1)), safe_column, is_here});
    ctx->saved_data["type"] = local_logits.scalar_type();
    return at::where(is_class, sample_losses, nan).mean();
  }

  // The gradient is softmax, minus 1 at the target, divided by n.
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      throw Error("parallel_cross_entropy can be differentiated once; call backward without create_graph");
    }
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &softmax = saved[0], &column = saved[1], &is_here = saved[2];
    const Tensor at_target = is_here.to(softmax.scalar_type()).neg().unsqueeze(1);
    const Tensor gradient = softmax.scatter_add(1, column, at_target) * (gradients[0] / softmax.size(0));
    return {gradient.to(ctx->saved_data.at("type").toScalarType()), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor parallel_cross_entropy(const Tensor& local_logits, const Tensor& targets, Rank& rank, int64_t total) {
  check(local_logits, targets);
  const auto sizes = sizes_in_group("parallel_cross_entropy", local_logits, 1, rank, total);
  const Classes classes{begin_of(sizes, rank.index()), sizes[rank.index()], begin_of(sizes, rank.world_size())};
  check_on_cpu(targets, classes.total);
  return CrossEntropy::apply(local_logits, targets, classes, rank);
}

}  // namespace lockstep
