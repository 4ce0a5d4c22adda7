// Samples: what batches are made of: tensors in memory, or a function that reads samples by their numbers.
//
// Copies share the tensors, and the function. Thread-safe for reading: all ranks of a process call the function at the
// same time, so it must be thread-safe too. Cost of a function: it is called once per batch and rank, on the rank's
// thread, which waits for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// Samples `x` [n, ...] and targets `y` [n, ...]. For images x is uint8 [n, channels, height, width], and y holds int64
// class indices.
struct Dataset {
  at::Tensor x;
  at::Tensor y;

  int64_t size() const { return x.size(0); }
  // Returns this Dataset, sharing its memory, if it is on `device` already. Otherwise returns a copy.
  Dataset to(const c10::Device& device) const { return {x.to(device), y.to(device)}; }
};

class Samples {
 public:
  // The samples of these numbers, in this order, as tensors with a row for each.
  using Read = std::function<Dataset(const std::vector<int64_t>& numbers)>;

  Samples() = default;  // none
  Samples(Dataset tensors) : tensors_(std::move(tensors)) {}
  // Samples 0 to size - 1, which `read` reads. What it gives stays as it is: uint8 does not become float. `version` is
  // any text that tells these samples from others: a run that goes on is refused samples of another version or number.
  // Throws Error for a size below 0 or an empty function.
  Samples(int64_t size, Read read, std::string version = {});

  int64_t size() const;
  bool in_memory() const { return !read_; }

  const Dataset& tensors() const { return tensors_; }  // undefined if a function reads them
  const std::string& version() const { return version_; }

  // What the function gives for these numbers. Throws Error if it is not a row for each of them.
  Dataset read(const std::vector<int64_t>& numbers) const;

  // Tensors in memory come to the device; a function stays as it is.
  Samples to(const c10::Device& device) const;

 private:
  Dataset tensors_;
  int64_t size_ = 0;  // if a function reads them
  Read read_;
  std::string version_;
};

}  // namespace lockstep
