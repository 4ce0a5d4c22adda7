// These are collectives through which gradients flow, as torch.distributed.nn.functional has them in Python.
//
// The first two are for losses over all ranks' outputs (docs/guide/contrastive.md). The other four are for layers that
// divide their work (tensor parallelism). Each one's gradient is another collective, its conjugate. So all can be
// differentiated twice. (Shoeybi et al. 2019, "Megatron-LM", section 3, call copy_to_group f and reduce_from_group g.)
// Call the same functions in the same order on all ranks of the group. In backward the ranks do so by themselves:
// autograd numbers nodes per thread as they are made, and runs ready nodes in the reverse order. So the order depends
// on the graph alone, also where branches meet, and ranks that run the same layers have the same graph.
//
// Backward calls the group's backend on the thread that runs it, with forward's stream current. On the CPU this is the
// rank's own thread. On a GPU it is autograd's thread of that GPU, while the rank's own thread waits. If ranks share a
// GPU, it is the rank's own thread there too; run() sees to that. In a group of one rank every function returns x. They
// throw Error as Rank's collectives do. lockstep.hpp does not include this header.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

// Joins all ranks' x along `dim`, in the order of the ranks. x may have any size along `dim`, also 0. Backward adds the
// ranks' gradients and gives each rank the slice of its x, in one exchange. Let each rank compute the same loss of the
// result, or a share of the loss, and give it to net.mean(loss, 1, rank.world_size()).
//   total  the result's size along `dim`, of which every rank has total / ranks, and the first total % ranks one more;
//          0: the ranks ask each other for their sizes, in one more small message
// Throws Error if there is no such dimension, or if x is not this rank's slice of `total`. If total is 0, throws Error
// on all ranks if x has a graph on some ranks only.
at::Tensor allgather_with_gradient(const at::Tensor& x, Rank& rank, int64_t dim = 0, int64_t total = 0);

// Gives the sum of all ranks' x, added in a fixed order, so with equal bits everywhere. Backward adds the ranks'
// gradients too, so that this function is the conjugate as well.
at::Tensor allreduce_with_gradient(const at::Tensor& x, Rank& rank);

// Use it before work that is split. Returns x, the input of all ranks; pass an equal x on each. Backward adds the
// ranks' gradients. It is Megatron's f. The conjugate is reduce_from_group.
at::Tensor copy_to_group(const at::Tensor& x, Rank& rank);

// Use it after work that is split, and not for a loss of different outputs. Returns the sum of all ranks' x. Backward
// passes the gradient on; the ranks' gradients must be equal. It is Megatron's g. The conjugate is copy_to_group.
at::Tensor reduce_from_group(const at::Tensor& x, Rank& rank);

// Use it after work that is split, and not for a loss of different outputs. Joins all ranks' x along `dim`, as
// allgather_with_gradient does. Backward takes this rank's slice of the gradient; the ranks' gradients must be equal.
// The conjugate is scatter_to_group. Its backward throws Error within a backward that a DataParallel averages over the
// same ranks, where the gradients would come out too small; and if total is 0, on all ranks whose gradients differ: the
// backwards 1, 2, 4, 8, … of a group compare some thousand values, on a GPU the first three of these.
at::Tensor gather_from_group(const at::Tensor& x, int64_t dim, Rank& rank, int64_t total = 0);

// Use it before work that is split. Copies this rank's slice of x along `dim`; pass an equal x on all ranks. Backward
// joins the ranks' gradients. Throws Error if there is no such dimension. The conjugate is gather_from_group.
at::Tensor scatter_to_group(const at::Tensor& x, int64_t dim, Rank& rank);

[[deprecated("lockstep::allgather_with_gradient")]] inline at::Tensor gather_in_group(const at::Tensor& x, int64_t dim,
                                                                                      Rank& rank, int64_t total = 0) {
  return allgather_with_gradient(x, rank, dim, total);
}

}  // namespace lockstep
