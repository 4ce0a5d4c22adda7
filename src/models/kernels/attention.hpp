// Declares what causal attention (src/models/causal_attention.cpp) does to the rows of its score matrices, in float32.
// It is compiled once per instruction set.
//
// Matrices are [rows][columns], with rows `row` values apart. Row i belongs to query first + i, which may look at the
// keys 0 to first + i; what lies behind them, up to `columns`, is 0 afterwards. The kernels do not allocate, keep
// nothing and start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// This struct has no member functions: see conv_relu_pool.hpp.
struct ScoreRows {
  int64_t row, rows, columns, first;
  float scale;  // the factor of the scores
};

struct AttentionKernels {
  // Turns scores into probabilities. Sets `largest` [rows] to the scaled maxima, and `inverse` [rows] to 1 / the sums.
  void (*softmax)(float* scores, const ScoreRows& of, float* largest, float* inverse);

  // Turns scores into the same probabilities again.
  void (*softmax_again)(float* scores, const ScoreRows& of, const float* largest, const float* inverse);

  // Turns gradients of the probabilities into gradients of the scores.
  void (*backward)(const float* probabilities, float* grads, const ScoreRows& of);
};

}  // namespace lockstep::kernels
