// Sends tensors from the host's memory to a GPU while both go on.
//
// A copy from ordinary memory makes the host wait until the GPU has done all that is queued. So the values first go
// into pinned memory, from which the GPU takes them when the copy's turn comes. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace lockstep {

// Returns what tensor.to(device) returns. A copy from the CPU to a CUDA GPU goes through that GPU's current stream.
at::Tensor upload(const at::Tensor& tensor, const c10::Device& device);

// Sends batches up on a stream of their own. So a copy does not wait for the step queued before, and no step waits for
// the copy of the batch behind its own.
class BatchUpload {
 public:
  // `order` (int64) holds the numbers of rows; an undefined one stands for 0, 1, 2, ….
  BatchUpload(const c10::Device& gpu, at::Tensor order);

  // Gives the rows whose numbers stand at [begin, begin + size) of the order. They are for the GPU's current stream,
  // which waits for the copy. Give `data` on the CPU that needs no gradient.
  at::Tensor rows(const at::Tensor& data, int64_t begin, int64_t size);

  // Begins to send these rows, for a later call of rows(). Drops other rows of `data` that were started before.
  void start(const at::Tensor& data, int64_t begin, int64_t size);

 private:
  struct Copy {
    at::Tensor data;  // the tensor that the rows are from
    int64_t begin, size;
    at::Tensor there;
    c10::Event arrived;
  };
  Copy copy_of(const at::Tensor& data, int64_t begin, int64_t size) const;

  const c10::Stream copies_;
  const at::Tensor order_;
  std::mutex mutex_;
  std::vector<Copy> started_;  // guarded by mutex_
};

}  // namespace lockstep
