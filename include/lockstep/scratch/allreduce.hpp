// allreduce: takes a plain list of one tensor per device, and puts their sum on every device.
//
// Four algorithms give the same sums. They differ in who adds and who sends; docs/algorithms.md has the table of steps
// and bytes. Not thread-safe for the same tensors. This table is for k devices and n bytes per tensor:
//   naive     device 0 receives and sends (k - 1) n bytes and adds alone        the section's own
//   sharded   device i adds slice i of all and sends it to all: 2 (k - 1) / k n  the section's exercise
//   ring      2 (k - 1) steps, each device sends n / k bytes to its neighbour
//   tree      2 ceil(log2 k) steps of n bytes: pairs, then pairs of pairs, and back
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace lockstep {

// Names the rows of the table above. automatic takes the algorithm that was fastest when measured (docs/algorithms.md).
// On the CPU this is naive, since the cores share every addition anyway. On GPUs it is sharded, which shares work and
// links.
enum class AllreduceAlgorithm { automatic, naive, sharded, ring, tree };

// Gives the algorithm's name: "automatic", "naive", "sharded", "ring" or "tree". Throws Error for any other value.
std::string_view to_string(AllreduceAlgorithm algorithm);

// Replaces every tensor's values, in place, by the sum over the list. [[1, 1]] and [[2, 2]] both become [[3, 3]].
// Tensors may be non-contiguous, empty and of any numeric type, which sums keep. A list of one stays as it is. The
// order in which an element's terms are added depends only on the list's length and the element's place in the tensor.
// So equal inputs give equal bits, the same on every device. automatic, naive and sharded add in the order of the list.
// Autograd records nothing. GPU work is queued on each device's current stream, and not waited for.
//
// Section: `allreduce` ("Data Synchronization"); sharded is its exercise "aggregate different parameters on different
// devices". Throws Error, before anything is changed, for an empty list, an undefined tensor, tensors that differ in
// shape, type or device type, a type that cannot be added (bool, sparse), or entries that share memory.
void allreduce(std::vector<at::Tensor>& tensors, AllreduceAlgorithm algorithm = AllreduceAlgorithm::automatic);

}  // namespace lockstep
