// The differentiable functions of tensor parallelism: what a group of ranks that share each layer's work exchanges.
//
// Each exchange's gradient is another one, its conjugate (Shoeybi et al. 2019, "Megatron-LM", section 3, where
// copy_to_group is f and reduce_from_group is g), so all six can be differentiated twice. All ranks of the group must
// call the same functions in the same order, and so they do in backward: autograd runs the nodes that are ready in the
// reverse order of their making, whose numbers count per thread. The order thus depends on the graph alone, also where
// branches meet, and the graph is the same on all ranks if all run the same layers. Backward calls the group's backend
// on the thread that runs it, with forward's stream current: on the CPU the rank's own; on a GPU autograd's thread of
// that GPU, while the rank's own waits, or the rank's own where ranks share a GPU (run() sees to that). In a group of
// one rank every function returns x. They throw Error as Rank's collectives do.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

// Before work that is split: x, equal on all ranks, is the input of all. Backward adds the ranks' gradients. Megatron's
// f. Conjugate: reduce_from_group.
at::Tensor copy_to_group(const at::Tensor& x, Rank& rank);

// After work that is split: the sum of all ranks' x, added in a fixed order, so with equal bits everywhere. Backward
// passes the gradient on, which must be equal on all ranks. Megatron's g. Conjugate: copy_to_group.
at::Tensor reduce_from_group(const at::Tensor& x, Rank& rank);

// After work that is split: all ranks' x, joined along `dim` in the order of the ranks. Backward takes this rank's part
// of the gradient, which must be equal on all ranks. Conjugate: scatter_to_group.
//   total  the result's size along `dim`, of which rank i has part_of(total, i, world_size), as everywhere in lockstep;
//          0: the ranks' sizes may be any, and are asked for first: one more small message
// Throws Error: no such dimension, x is not this rank's part of `total`.
at::Tensor gather_from_group(const at::Tensor& x, int64_t dim, Rank& rank, int64_t total = 0);

// Before work that is split: this rank's part of x, equal on all ranks, along `dim`, copied. Backward joins the ranks'
// gradients. Throws Error: no such dimension. Conjugate: gather_from_group.
at::Tensor scatter_to_group(const at::Tensor& x, int64_t dim, Rank& rank);

// Between two works that are split, of which the second needs all that the first made:
// copy_to_group(gather_from_group(x)), but its backward adds the ranks' gradients and hands each rank its part in one
// exchange, which sends half as much. Conjugate: reduce_scatter_in_group.
at::Tensor gather_in_group(const at::Tensor& x, int64_t dim, Rank& rank, int64_t total = 0);

// The same the other way: scatter_to_group(reduce_from_group(x)) in one exchange. Conjugate: gather_in_group.
at::Tensor reduce_scatter_in_group(const at::Tensor& x, int64_t dim, Rank& rank);

// torch::nn::functional::cross_entropy (mean over the samples) of logits that are split over the ranks by class; no
// rank ever holds all of them. Two small exchanges in forward (each sample's maximum; its sum of exponentials and its
// target's logit), none in backward.
//   local_logits  [n, this rank's classes]; bfloat16 and float16 are computed in float32
//   targets       [n], int64, of all classes 0 … total - 1, equal on all ranks; one outside: Error on the CPU, a loss
//                 of NaN on GPUs, where a look at the values would stop the queue
//   total         number of classes, of which rank i has part_of(total, i, world_size); 0: asked for, as above
//   returns       a scalar with equal bits on all ranks, which can be differentiated once
// Throws Error, which shows the shapes, for tensors that do not fit.
at::Tensor parallel_cross_entropy(const at::Tensor& local_logits, const at::Tensor& targets, Rank& rank,
                                  int64_t total = 0);

}  // namespace lockstep
