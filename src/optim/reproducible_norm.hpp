// A Euclidean norm whose bits depend on the values alone: not on their order, nor on how they are cut and shared out.
//
// A sum of floating-point numbers depends on its order, because it rounds. Here each square is rounded first, to a
// multiple of a unit so coarse that the sum is exact in any order: pre-rounding (Demmel and Nguyen 2015, "Parallel
// Reproducible Summation"). What was cut off is summed likewise with a finer unit. The units go by the largest value,
// so the ranks agree on that first:
//
//   const at::Tensor largest = largest_magnitude(pieces, device);  // then an allreduce, MAX
//   const at::Tensor sums = sums_of_squares(pieces, largest);      // then an allreduce, SUM
//   const at::Tensor norm = norm_of(sums, largest);
//
// The relative error is about 1e-16, and at most n * 2^-79 more for n values. Pieces: floating-point tensors of any
// type, size and strides, on one device; up to 2^39 values. Nothing waits for a GPU. Pure functions. Cost: two passes
// over the pieces. On a GPU up to 96 MiB, which are freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// float64 [2]: the largest |value|, 0 if that is not finite; and what there is beyond it: 0 nothing, 1 an infinity, 2 a
// NaN. Maxima of these are what all pieces together give.
at::Tensor largest_magnitude(const std::vector<at::Tensor>& pieces, const c10::Device& device);

// float64 [4]: parts of the sum of squares, scaled by a power of two. `largest` is that of all pieces of all ranks. The
// sums of several calls can be added, exactly. On the CPU this is a loop, elsewhere operators.
at::Tensor sums_of_squares(const std::vector<at::Tensor>& pieces, const at::Tensor& largest);

// The same by LibTorch's operators, on any device.
at::Tensor sums_by_operators(const std::vector<at::Tensor>& pieces, const at::Tensor& largest);

// float64, one number: infinite or NaN where a value is.
at::Tensor norm_of(const at::Tensor& sums, const at::Tensor& largest);

}  // namespace lockstep
