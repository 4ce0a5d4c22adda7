// Tensors go from the host's memory to a GPU while both go on.
//
// From ordinary memory a copy makes the host wait until the GPU has done all that is queued. So the values first go
// into pinned memory, from which the GPU takes them when the copy's turn comes. Used by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace lockstep {

// What tensor.to(device) gives. From the CPU to a GPU of CUDA it is copied on that GPU's current stream.
at::Tensor upload(const at::Tensor& tensor, const c10::Device& device);

// Batches go up on a stream of their own: the copy of one does not wait for the step that is queued before it.
class BatchUpload {
 public:
  explicit BatchUpload(const c10::Device& gpu);

  // Rows [begin, begin + size) of `data`, which is on the CPU and needs no gradient; or, with `order` (int64), the rows
  // whose numbers stand there. For the GPU's current stream.
  at::Tensor rows(const at::Tensor& data, int64_t begin, int64_t size, const at::Tensor& order) const;

 private:
  const c10::Stream copies_;
};

}  // namespace lockstep
