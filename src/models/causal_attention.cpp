#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/custom_function.h>
#include <lockstep/models/gpt.hpp>

#include "devices/micro_kernel.hpp"
#include "intra_op.hpp"
#include "models/kernels/kernels.hpp"
#include "own_kernels.hpp"

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kQueries = 64;  // queries of a block, whose scores stay in the caches

// `attend` maps queries, keys and values [n, heads, length, size].
at::Tensor plain_attention(const at::Tensor& qkv, int64_t heads, const auto& attend) {
  // Cut along the last dimension: then backward puts the parts together in one pass over memory.
  auto parts = qkv.chunk(3, /*dim=*/-1);
  for (auto& part : parts) part = part.unflatten(-1, {heads, -1}).transpose(1, 2);  // [n, heads, length, size]
  return attend(parts[0], parts[1], parts[2]).transpose(1, 2).flatten(2);
}

at::Tensor libtorchs(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values) {
  return at::scaled_dot_product_attention(queries, keys, values, /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
}

// LibTorch's fast attention on CPUs has no second derivative.
at::Tensor differentiable_twice(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values) {
  return std::get<0>(at::_scaled_dot_product_attention_math(queries, keys, values, /*attn_mask=*/{}, /*dropout_p=*/0,
                                                            /*is_causal=*/true));
}

// Says where the heads lie in qkv [n, length, 3 * width] and in the result [n, length, width].
struct Heads {
  Heads(const at::Tensor& qkv, int64_t heads)
      : heads(heads), samples(qkv.size(0)), length(qkv.size(1)), width(qkv.size(2) / 3), size(width / heads) {
    while (scratch_row < length) scratch_row *= 2;
  }

  int64_t count() const { return samples * heads; }
  int64_t row() const { return 3 * width; }  // values of qkv
  // Gives the first value of a head's queries (part 0), keys (1) or values (2).
  int64_t place(int64_t head, int64_t part) const {
    return head / heads * length * row() + part * width + head % heads * size;
  }
  int64_t place_of_result(int64_t head) const { return head / heads * length * width + head % heads * size; }
  int64_t first_of_last_block() const { return (length - 1) / kQueries * kQueries; }

  // A query looks at no later key. So a block needs the keys up to its last query alone.
  kernels::ScoreRows block(int64_t first) const {
    const int64_t rows = std::min(kQueries, length - first);
    return {.row = scratch_row,
            .rows = rows,
            .columns = first + rows,
            .first = first,
            .scale = 1 / std::sqrt(static_cast<float>(size))};
  }

  const int64_t heads, samples, length, width, size;
  // Rows of the scratch are powers of two apart: LibTorch keeps a kernel for each distance, so texts of many lengths
  // must not bring one each.
  int64_t scratch_row = kQueries;
};

// Divides a thread's memory beside the tensors. All rows begin where cache lines do.
struct Scratch {
  Scratch(const Heads& of, float* memory)
      : keys(memory),
        values(keys + of.scratch_row * of.size),
        scores(values + of.scratch_row * of.size),
        grads(scores + of.scratch_row * kQueries),
        turned(grads + of.scratch_row * kQueries) {}

  static int64_t floats(const Heads& of) { return of.scratch_row * (2 * of.size + 3 * kQueries); }

  float *const keys, *const values;                  // [size, length], transposed
  float *const scores, *const grads, *const turned;  // a block's
};

void turn(const float* from, int64_t row, int64_t rows, int64_t columns, float* to, int64_t row_of_to) {
  kernels::of_this_cpu().matrices.transpose(from, row, rows, columns, to, row_of_to);
}

void scores_of(const Heads& of, const kernels::ScoreRows& block, const float* queries, const Scratch& scratch) {
  multiply(block.rows, block.columns, of.size, queries + block.first * of.row(), of.row(), scratch.keys, of.scratch_row,
           scratch.scores, of.scratch_row, /*adds=*/false);
}

void forward_of_head(const Heads& of, const float* qkv, int64_t head, float* result, float* largest, float* inverse,
                     const Scratch& scratch) {
  turn(qkv + of.place(head, 1), of.row(), of.length, of.size, scratch.keys, of.scratch_row);
  for (int64_t first = 0; first < of.length; first += kQueries) {
    const auto block = of.block(first);
    scores_of(of, block, qkv + of.place(head, 0), scratch);
    kernels::of_this_cpu().attention.softmax(scratch.scores, block, largest + first, inverse + first);
    multiply(block.rows, of.size, block.columns, scratch.scores, of.scratch_row, qkv + of.place(head, 2), of.row(),
             result + of.place_of_result(head) + first * of.width, of.width, /*adds=*/false);
  }
}

// The last block looks at all keys. So the last block sets the gradients of keys and values, and those before it add.
void backward_of_head(const Heads& of, const float* qkv, int64_t head, const float* grad, const float* largest,
                      const float* inverse, float* grad_qkv, const Scratch& scratch) {
  const float* const queries = qkv + of.place(head, 0);
  const float* const keys = qkv + of.place(head, 1);
  turn(keys, of.row(), of.length, of.size, scratch.keys, of.scratch_row);
  turn(qkv + of.place(head, 2), of.row(), of.length, of.size, scratch.values, of.scratch_row);
  for (int64_t first = of.first_of_last_block(); first >= 0; first -= kQueries) {
    const auto block = of.block(first);
    const bool adds = first < of.first_of_last_block();
    const float* const grad_rows = grad + of.place_of_result(head) + first * of.width;
    scores_of(of, block, queries, scratch);
    kernels::of_this_cpu().attention.softmax_again(scratch.scores, block, largest + first, inverse + first);
    turn(scratch.scores, of.scratch_row, block.rows, block.columns, scratch.turned, kQueries);
    multiply(block.columns, of.size, block.rows, scratch.turned, kQueries, grad_rows, of.width,
             grad_qkv + of.place(head, 2), of.row(), adds);
    multiply(block.rows, block.columns, of.size, grad_rows, of.width, scratch.values, of.scratch_row, scratch.grads,
             of.scratch_row, /*adds=*/false);
    kernels::of_this_cpu().attention.backward(scratch.scores, scratch.grads, block);
    multiply(block.rows, of.size, block.columns, scratch.grads, of.scratch_row, keys, of.row(),
             grad_qkv + of.place(head, 0) + first * of.row(), of.row(), /*adds=*/false);
    turn(scratch.grads, of.scratch_row, block.rows, block.columns, scratch.turned, kQueries);
    multiply(block.columns, of.size, block.rows, scratch.turned, kQueries, queries + first * of.row(), of.row(),
             grad_qkv + of.place(head, 1), of.row(), adds);
  }
}

// Computes as FlashAttention does (Dao et al. 2022): scores live in the caches alone, and backward computes them again.
class MicroKernelAttention : public torch::autograd::Function<MicroKernelAttention> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv, int64_t heads) {
    const Heads of(qkv, heads);
    const at::Tensor dense = qkv.contiguous(), result = at::empty({of.samples, of.length, of.width}, qkv.options());
    const at::Tensor sums = at::empty({2, of.count(), of.length}, qkv.options());
    const float* const from = dense.const_data_ptr<float>();
    float* const to = result.mutable_data_ptr<float>();
    float* const largest = sums.mutable_data_ptr<float>();
    float* const inverse = largest + of.count() * of.length;
    for_each_with_scratch(of.count(), Scratch::floats(of), [&](int64_t head, float* memory) {
      forward_of_head(of, from, head, to, largest + head * of.length, inverse + head * of.length, {of, memory});
    });
    ctx->saved_data["heads"] = heads;
    ctx->save_for_backward({qkv, sums});
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& qkv = saved[0];
    const int64_t heads = ctx->saved_data["heads"].toInt();
    if (!grads[0].defined()) return {{}, {}};
    if (at::GradMode::is_enabled()) {
      return {differentiable_gradients(plain_attention(qkv, heads, differentiable_twice), grads[0], {qkv})[0], {}};
    }
    const Heads of(qkv, heads);
    const at::Tensor dense = qkv.contiguous(), grad = grads[0].resolve_neg().contiguous();
    const at::Tensor grad_qkv = at::empty(qkv.sizes(), qkv.options());
    const float* const from = dense.const_data_ptr<float>();
    const float* const grad_from = grad.const_data_ptr<float>();
    const float* const largest = saved[1].const_data_ptr<float>();
    const float* const inverse = largest + of.count() * of.length;
    float* const to = grad_qkv.mutable_data_ptr<float>();
    for_each_with_scratch(of.count(), Scratch::floats(of), [&](int64_t head, float* memory) {
      backward_of_head(of, from, head, grad_from, largest + head * of.length, inverse + head * of.length, to,
                       {of, memory});
    });
    return {grad_qkv, {}};
  }
};

bool suits_micro_kernel(const at::Tensor& qkv, int64_t heads) {
  constexpr int64_t most = int64_t{1} << 29;  // oneDNN counts the bytes of a text, and of a block's scores, in 32 bits
  return is_plain_float(qkv) && qkv.dim() == 3 && qkv.numel() > 0 && heads > 0 && qkv.size(2) % (3 * heads) == 0 &&
         qkv.size(1) * std::max(qkv.size(2), 2 * kQueries) < most && takes_micro_kernel();
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& qkv, int64_t heads) {
  return suits_micro_kernel(qkv, heads) ? MicroKernelAttention::apply(qkv, heads)
                                        : plain_attention(qkv, heads, libtorchs);
}

}  // namespace lockstep
