// Finds streams of a GPU of any type, in c10's words. The CPU has none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace lockstep {

// Gives the calling thread's current stream of `device`.
c10::Stream current_stream(const c10::Device& device);

// Gives a stream of the device's pool, whose work runs beside other work. A type without a pool, as Apple's, gives its
// current stream. Then work is done in the order in which it is queued, and results are right too.
c10::Stream stream_beside(const c10::Device& device, bool high_priority = false);

// Gives the stream of the `number`-th rank on the device: the same one in each run, because memory that is freed, and
// cuBLAS's workspaces, are kept by stream. Thread-safe.
c10::Stream stream_of_rank(const c10::Device& device, int number);

// Makes `later` wait for all that is on `earlier` by now. On the CPU there is nothing to wait for.
void queue_after(const c10::Stream& earlier, const c10::Stream& later);

// Tells the allocator that `stream` uses `tensor` as well. So the tensor's memory is not given away before the stream
// is done. Does nothing for a type whose memory does not need this. (The operator record_stream is CUDA's and Intel's
// alone.)
void keep_for(const at::Tensor& tensor, const c10::Stream& stream);

}  // namespace lockstep
