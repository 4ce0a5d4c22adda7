#include <ATen/autocast_mode.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/conv_relu_pool.hpp>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "base/classic.hpp"
#include "intra_op.hpp"
#include "models/kernels/kernels.hpp"
#include "own_kernels.hpp"

namespace lockstep {
namespace {

using kernels::ConvReluPoolKernels;
using kernels::ConvReluPoolPasses;
using kernels::ConvReluPoolShape;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor by_libtorch(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::avg_pool2d(at::relu(at::conv2d(x, weight, bias)), /*kernel_size=*/2);
}

void check_shapes(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto shape = [](const at::Tensor& tensor) {
    return tensor.defined() ? classic_text(tensor.sizes()) : std::string("undefined");
  };
  const bool fit = x.defined() && x.dim() == 4 && weight.defined() && weight.dim() == 4 && weight.size(0) > 0 &&
                   weight.size(1) > 0 && x.size(1) == weight.size(1) && weight.size(2) > 0 && weight.size(3) > 0 &&
                   x.size(2) > weight.size(2) && x.size(3) > weight.size(3) &&
                   (!bias.defined() || bias.sizes() == at::IntArrayRef({weight.size(0)}));
  if (fit) return;
  throw Error(
      "conv_relu_pool: x must be [n, channels, height, width], weight [out_channels, channels, kernel_height, " +
      std::string("kernel_width] with a kernel smaller than the image, and bias [out_channels] or undefined; ") +
      "these are " + shape(x) + ", " + shape(weight) + " and " + shape(bias));
}

// ---- Around the kernels --------------------------------------------------------------------------------------------

ConvReluPoolShape shape_of(const at::Tensor& x, const at::Tensor& weight) {
  return {.channels = x.size(1),
          .height = x.size(2),
          .width = x.size(3),
          .out_channels = weight.size(0),
          .kernel_height = weight.size(2),
          .kernel_width = weight.size(3),
          .pooled_height = (x.size(2) - weight.size(2) + 1) / 2,
          .pooled_width = (x.size(3) - weight.size(3) + 1) / 2};
}

// Divides the samples into the blocks of the kernels' layout. A block's first value is the same in both layouts.
RowRanges blocks_of(const at::Tensor& tensor) {
  const int64_t samples = tensor.size(0);
  return {samples, tensor.numel() / samples, kernels::of_this_cpu().conv_relu_pool.lanes};
}

at::Tensor floats(at::IntArrayRef sizes) {
  return at::empty(sizes, at::kFloat);
}

// Takes AMX where products fill tiles and pay for splitting the factors (docs/decisions/0084). Two channels of x share
// a word. The limits of an image and of the weight bound each thread's scratch, to some 50 MB.
const ConvReluPoolPasses& passes_for(const ConvReluPoolShape& s) {
  const auto fills = [](int64_t channels) { return channels * 5 >= at::divup(channels, 32) * 32 * 3; };
  const int64_t weight = s.out_channels * s.channels * s.kernel_height * s.kernel_width;
  const int64_t image =
      std::max(s.channels * s.height * s.width, s.out_channels * s.pooled_height * s.pooled_width * 4);
  const bool suits = fills(s.out_channels) && fills(s.channels) && s.channels % 2 == 0 && weight >= 1 << 12 &&
                     weight <= 1 << 20 && image <= 1 << 16;
  // oneDNN must be on for has_amx(), which keeps its first answer. takes_micro_kernel() may measure, so it comes last.
  const bool takes_amx = suits && at::globalContext().userEnabledMkldnn() && has_amx() && takes_micro_kernel();
  return takes_amx ? kernels::of_this_cpu().amx->conv_relu_pool : kernels::of_this_cpu().conv_relu_pool.passes;
}

struct Result {
  at::Tensor out;
  at::Tensor x_blocks, passed;  // kept for backward
};

Result run_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const ConvReluPoolKernels& kernels = kernels::of_this_cpu().conv_relu_pool;
  const ConvReluPoolShape shape = shape_of(x, weight);
  const ConvReluPoolPasses& passes = passes_for(shape);
  const at::Tensor images = x.contiguous(), weights = weight.contiguous(), biases = bias.contiguous();
  Result result;
  result.out = floats({x.size(0), shape.out_channels, shape.pooled_height, shape.pooled_width});
  const RowRanges in = blocks_of(images), out = blocks_of(result.out);
  result.x_blocks = floats({in.count(), in.size, in.most});
  result.passed = at::empty({out.count(), out.size, out.most}, at::kByte);
  const at::Tensor packed = floats({passes.packed_size(shape)});
  passes.pack_for_forward(shape, weights.const_data_ptr<float>(), packed.mutable_data_ptr<float>());

  const float* const from = images.const_data_ptr<float>();
  float* const to = result.out.mutable_data_ptr<float>();
  float* const x_blocks = result.x_blocks.mutable_data_ptr<float>();
  uint8_t* const passed = result.passed.mutable_data_ptr<uint8_t>();
  const int64_t out_block_size = out.size * out.most;  // the pass's scratch lies behind the block
  for_each_with_scratch(in.count(), out_block_size + passes.scratch_size(shape), [&](int64_t i, float* out_block) {
    kernels.to_block(from + in.first_value(i), in.rows_in(i), in.size, x_blocks + in.first_value(i));
    passes.forward(shape, x_blocks + in.first_value(i), packed.const_data_ptr<float>(), biases.const_data_ptr<float>(),
                   out_block + out_block_size, out_block, passed + out.first_value(i));
    kernels.from_block(out_block, out.rows_in(i), out.size, to + out.first_value(i));
  });
  return result;
}

at::Tensor in_blocks(const at::Tensor& tensor, const ConvReluPoolKernels& kernels) {
  const at::Tensor from = tensor.contiguous();
  const RowRanges blocks = blocks_of(from);
  const at::Tensor result = floats({blocks.count(), blocks.size, blocks.most});
  for_each_in_parallel(blocks.count(), [&](int64_t i) {
    kernels.to_block(from.const_data_ptr<float>() + blocks.first_value(i), blocks.rows_in(i), blocks.size,
                     result.mutable_data_ptr<float>() + blocks.first_value(i));
  });
  return result;
}

at::Tensor gradient_of_x(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& passed,
                         const at::Tensor& grad_blocks) {
  const ConvReluPoolKernels& kernels = kernels::of_this_cpu().conv_relu_pool;
  const ConvReluPoolShape shape = shape_of(x, weight);
  const ConvReluPoolPasses& passes = passes_for(shape);
  const at::Tensor grad_x = floats(x.sizes());
  const RowRanges in = blocks_of(grad_x);
  const at::Tensor weights = weight.contiguous(), packed = floats({passes.packed_size(shape)});
  passes.pack_for_backward(shape, weights.const_data_ptr<float>(), packed.mutable_data_ptr<float>());
  const int64_t in_block = in.size * in.most;  // the pass's scratch lies behind the block
  for_each_with_scratch(in.count(), in_block + passes.scratch_size(shape), [&](int64_t i, float* block) {
    passes.backward_input(shape, grad_blocks.select(0, i).const_data_ptr<float>(),
                          passed.select(0, i).const_data_ptr<uint8_t>(), packed.const_data_ptr<float>(),
                          block + in_block, block);
    kernels.from_block(block, in.rows_in(i), in.size, grad_x.mutable_data_ptr<float>() + in.first_value(i));
  });
  return grad_x;
}

struct ParameterGradients {
  at::Tensor weight, bias;
};

ParameterGradients gradients_of_parameters(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& x_blocks,
                                           const at::Tensor& passed, const at::Tensor& grad_blocks) {
  const ConvReluPoolShape shape = shape_of(x, weight);
  const ConvReluPoolPasses& passes = passes_for(shape);
  const ParameterGradients grads{floats(weight.sizes()), floats({shape.out_channels})};
  const int64_t groups = passes.weight_groups(shape, at::get_num_threads());
  for_each_with_scratch(groups, passes.scratch_size(shape), [&](int64_t group, float* scratch) {
    passes.backward_weight(shape, x_blocks.size(0), group, groups, x_blocks.const_data_ptr<float>(),
                           grad_blocks.const_data_ptr<float>(), passed.const_data_ptr<uint8_t>(), scratch,
                           grads.weight.mutable_data_ptr<float>(), grads.bias.mutable_data_ptr<float>());
  });
  return grads;
}

// ---- As a differentiable function ----------------------------------------------------------------------------------

class ConvReluPoolFunction : public torch::autograd::Function<ConvReluPoolFunction> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) {
    const Result result = run_forward(x, weight, bias);
    ctx->save_for_backward({x, weight, bias, result.x_blocks, result.passed});
    return result.out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &x_blocks = saved[3], &passed = saved[4];
    if (at::GradMode::is_enabled()) {
      return differentiable_gradients(by_libtorch(x, weight, bias), grads[0], {x, weight, bias});
    }
    RECORD_USER_SCOPE_WITH_INPUTS("lockstep::conv_relu_pool_backward", read_by_kernels({weight}));
    const at::Tensor grad_blocks = in_blocks(grads[0].resolve_neg(), kernels::of_this_cpu().conv_relu_pool);
    variable_list result(3);
    if (ctx->needs_input_grad(0)) result[0] = gradient_of_x(x, weight, passed, grad_blocks);
    if (ctx->needs_input_grad(1) || ctx->needs_input_grad(2)) {
      const ParameterGradients parameters = gradients_of_parameters(x, weight, x_blocks, passed, grad_blocks);
      if (ctx->needs_input_grad(1)) result[1] = parameters.weight;
      if (ctx->needs_input_grad(2)) result[2] = parameters.bias;
    }
    return result;
  }
};

}  // namespace

at::Tensor conv_relu_pool(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  RECORD_USER_SCOPE_WITH_INPUTS("lockstep::conv_relu_pool", read_by_kernels({weight, bias}));
  check_shapes(x, weight, bias);
  // LibTorch is faster with few samples, up to 5 of 16 lanes as measured: one sample costs as much as a block.
  const bool is_enough = x.size(0) > kernels::of_this_cpu().conv_relu_pool.lanes / 3;
  const bool suits =  // mixed precision would compute the convolution in bfloat16
      !at::autocast::is_autocast_enabled(at::kCPU) && is_enough && is_plain_float(x) && is_plain_float(weight) &&
      (!bias.defined() || is_plain_float(bias));
  if (!suits) return by_libtorch(x, weight, bias);
  // An undefined tensor cannot be a differentiable function's argument.
  return ConvReluPoolFunction::apply(x, weight, bias.defined() ? bias : at::zeros({weight.size(0)}, at::kFloat));
}

ConvReluPoolImpl::ConvReluPoolImpl(int64_t in_channels, int64_t out_channels, int64_t kernel)
    : in_channels_(in_channels), out_channels_(out_channels), kernel_(kernel) {
  if (in_channels < 1 || out_channels < 1 || kernel < 1) {
    throw Error("ConvReluPool: all sizes must be at least 1; these are in_channels " + std::to_string(in_channels) +
                ", out_channels " + std::to_string(out_channels) + ", kernel " + std::to_string(kernel));
  }
  reset();
}

at::Tensor ConvReluPoolImpl::forward(const at::Tensor& x) {
  return conv_relu_pool(x, weight, bias);
}

void ConvReluPoolImpl::reset() {
  weight = register_parameter("weight", at::empty({out_channels_, in_channels_, kernel_, kernel_}));
  bias = register_parameter("bias", at::empty({out_channels_}));
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));  // so does torch::nn::Conv2d
  const double bound = 1 / std::sqrt(static_cast<double>(in_channels_ * kernel_ * kernel_));
  torch::nn::init::uniform_(bias, -bound, bound);
}

void ConvReluPoolImpl::pretty_print(std::ostream& out) const {
  out << "lockstep::ConvReluPool(" << in_channels_ << ", " << out_channels_ << ", kernel_size=[" << kernel_ << ", "
      << kernel_ << "])";
}

}  // namespace lockstep
