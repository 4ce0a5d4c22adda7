// These are the differentiable functions of tensor parallelism: exchanges between the ranks of a group that divide each
// layer's work.
//
// Each exchange's gradient is another one, its conjugate. So all six can be differentiated twice. (Shoeybi et al. 2019,
// "Megatron-LM", section 3, call copy_to_group f and reduce_from_group g.) Call the same functions in the same order on
// all ranks of the group. In backward the ranks do so by themselves: autograd numbers nodes per thread as they are
// made, and runs ready nodes in the reverse order. So the order depends on the graph alone, also where branches meet,
// and ranks that run the same layers have the same graph.
//
// Backward calls the group's backend on the thread that runs it, with forward's stream current. On the CPU this is the
// rank's own thread. On a GPU it is autograd's thread of that GPU, while the rank's own thread waits. If ranks share a
// GPU, it is the rank's own thread there too; run() sees to that. In a group of one rank every function returns x. They
// throw Error as Rank's collectives do.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>

namespace lockstep {

// Use it before work that is split. Returns x, the input of all ranks; pass an equal x on each. Backward adds the
// ranks' gradients. It is Megatron's f. The conjugate is reduce_from_group.
at::Tensor copy_to_group(const at::Tensor& x, Rank& rank);

// Use it after work that is split. Returns the sum of all ranks' x, added in a fixed order, so with equal bits
// everywhere. Backward passes the gradient on; the ranks' gradients must be equal. It is Megatron's g. The conjugate is
// copy_to_group.
at::Tensor reduce_from_group(const at::Tensor& x, Rank& rank);

// Use it after work that is split. Joins all ranks' x along `dim`, in the order of the ranks. Backward takes this
// rank's slice of the gradient; the ranks' gradients must be equal. The conjugate is scatter_to_group.
//   total  the result's size along `dim`, of which every rank has total / ranks, and the first total % ranks one more;
//          0: slices may have any size, and the ranks ask each other for it in one more small message
// Throws Error if there is no such dimension, or if x is not this rank's slice of `total`.
at::Tensor gather_from_group(const at::Tensor& x, int64_t dim, Rank& rank, int64_t total = 0);

// Use it before work that is split. Copies this rank's slice of x along `dim`; pass an equal x on all ranks. Backward
// joins the ranks' gradients. Throws Error if there is no such dimension. The conjugate is gather_from_group.
at::Tensor scatter_to_group(const at::Tensor& x, int64_t dim, Rank& rank);

// Use it between two works that are split, if the second needs all that the first made. Returns the same as
// copy_to_group(gather_from_group(x)). But backward adds the ranks' gradients and gives each rank its slice in one
// exchange, which sends half as much. The conjugate is reduce_scatter_in_group.
at::Tensor gather_in_group(const at::Tensor& x, int64_t dim, Rank& rank, int64_t total = 0);

// Returns the same as scatter_to_group(reduce_from_group(x)), in one exchange. The conjugate is gather_in_group.
at::Tensor reduce_scatter_in_group(const at::Tensor& x, int64_t dim, Rank& rank);

}  // namespace lockstep
