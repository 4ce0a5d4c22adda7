// Computes a Euclidean norm whose bits depend on the values alone: neither on order nor on how they are divided.
//
// A sum of floating-point numbers depends on the order, because it rounds. Here each square is rounded first, to a
// multiple of a unit so coarse that the sum is exact in any order: pre-rounding (Demmel and Nguyen 2015, "Parallel
// Reproducible Summation"). The rest of each square is summed likewise with a finer unit. The largest value decides the
// units, so the ranks agree on that first:
//
//   const at::Tensor largest = largest_magnitude(slices, device);  // then an allreduce, MAX
//   const at::Tensor sums = sums_of_squares(slices, largest);      // then an allreduce, SUM
//   const at::Tensor norm = norm_of(sums, largest);
//
// The relative error is about 1e-16, and at most n * 2^-79 more for n values. Give slices as floating-point tensors of
// any type, size and strides, on one device, of up to 2^39 values. Nothing waits for a GPU. Pure functions. Cost: two
// passes over the slices, and on a GPU up to 96 MiB, which are freed.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// Gives float64 [2]: the largest |value|, or 0 if that is not finite; and 0 if all are finite, 1 for an infinity, 2 for
// a NaN. The maxima of several calls' results are the result for all their slices.
at::Tensor largest_magnitude(const std::vector<at::Tensor>& slices, const c10::Device& device);

// Gives float64 [4]: the sum of squares in four numbers, scaled by a power of two. Give as `largest` that of all slices
// of all ranks. You may add several calls' sums, which is exact. On the CPU this is a loop, elsewhere operators.
at::Tensor sums_of_squares(const std::vector<at::Tensor>& slices, const at::Tensor& largest);

// Computes these sums by LibTorch's operators, on any device.
at::Tensor sums_by_operators(const std::vector<at::Tensor>& slices, const at::Tensor& largest);

// Gives float64, one number: infinite or NaN if a value is.
at::Tensor norm_of(const at::Tensor& sums, const at::Tensor& largest);

}  // namespace lockstep
