// keep_freed_memory: lets a process keep the memory that it frees, which makes training on the CPU faster.
//
// The activations of a training step are large blocks that live for milliseconds. By default glibc gives freed blocks
// back to the kernel, and the kernel clears new pages at every step. Meanwhile the rank threads wait for each other in
// its page fault handler. This can take a third of the time. Small tensors come and go too. LibTorch asks glibc for
// memory in a way that keeps freed blocks from being used again.
#pragma once

namespace lockstep {

// Call it first in main(), before other threads allocate. It sets the process's malloc by mallopt, and has LibTorch
// take the CPU's tensors by malloc, in huge pages where the kernel has some (unless the program has set an allocator,
// or THP_MEM_ALLOC_ENABLE). Blocks of up to 32 MB come from the heap. Up to 1 GB of freed memory stays with the
// process, and 64 MB more for each thread that allocates. Huge pages let memory grow in steps of 2 MB. It does nothing
// where the C library is not glibc. The program `lockstep` calls it, the library never does: a process's memory is its
// owner's. A second call changes nothing.
void keep_freed_memory();

}  // namespace lockstep
