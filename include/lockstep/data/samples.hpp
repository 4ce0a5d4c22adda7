// Samples: what batches are made of: tensors in memory, or a function that reads samples by their numbers; and in which
// order an epoch takes them.
//
// Copies share the tensors, and the functions. Thread-safe for reading: all ranks of a process call the functions at
// the same time, so they must be thread-safe too. Cost of a function that reads: it is called once per batch and rank,
// or with a grain (BatchOptions::grain) once per grain, on the rank's thread, which waits for it; with read_ahead() on
// a thread beside it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

using TensorsByName = std::map<std::string, at::Tensor>;

// Samples `x` [n, ...] and targets `y` [n, ...]. For images x is uint8 [n, channels, height, width], and y holds int64
// class indices. `more` are further tensors of the same samples, [n, ...] each: masks, a second input, weights of a
// loss. A batch has their rows under the same names, of the types that they have here.
struct Dataset {
  at::Tensor x;
  at::Tensor y;
  TensorsByName more = {};

  int64_t size() const { return x.size(0); }
  // Returns this Dataset, sharing its memory, if it is on `device` already. Otherwise returns a copy.
  Dataset to(const c10::Device& device) const;
};

class Samples {
 public:
  // The samples of these numbers, in this order, as tensors with a row for each. With a grain the rows of all samples
  // need one type and one shape.
  using Read = std::function<Dataset(const std::vector<int64_t>& numbers)>;
  // The numbers of an epoch's samples, int64 [size()] on the CPU, each from 0 to below size().
  using Order = std::function<at::Tensor(uint64_t seed, int64_t epoch)>;

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

  // ---- Copies of it that differ in one thing.

  // The function is called up to `batches` batches early, on a thread of its own: one for each Batches, which ends with
  // it. What it throws is thrown where the batch is taken. Tensors in memory are not read, so this changes nothing for
  // them. Throws Error below 0; 0: on the thread that takes the batch.
  Samples read_ahead(int batches) const;

  // Another order than a permutation: a sampler. The order must follow from its arguments alone, and be the same on
  // all ranks; batches of unequal orders are refused by backward(). `version` tells orders apart, as above. Batches
  // without shuffle, and evaluations, take samples 0, 1, 2, … all the same. Throws Error for an empty function.
  Samples with_order(Order order, std::string version = {}) const;

  // Draws with replacement, size() times per epoch, each sample as often as its weight says on average, as PyTorch's
  // WeightedRandomSampler does: for classes of unequal size. `weights` is [size()], of any floating or integer type.
  // Throws Error for another size, and for weights that are negative, not finite, or all 0.
  Samples with_weights(const at::Tensor& weights) const;

  // ---- What batches() needs.

  // What the function gives for these numbers. With a grain it is called for so many of them at a time: what it
  // computes of many rows at once may have other last bits than of few, and a sample must have the same bits however
  // its batch is shared out. Throws Error if it does not give a row for each number, or rows of unequal types or
  // shapes.
  Dataset read(const std::vector<int64_t>& numbers, int64_t grain = 0) const;
  int batches_ahead() const { return ahead_; }

  bool has_order() const { return static_cast<bool>(order_); }
  const std::string& order_version() const { return order_version_; }
  // Throws Error if the function gives no order of size() samples.
  at::Tensor order(uint64_t seed, int64_t epoch) const;

  // Tensors in memory come to the device; a function stays as it is.
  Samples to(const c10::Device& device) const;

 private:
  Dataset read_at_once(const std::vector<int64_t>& numbers) const;

  Dataset tensors_;
  int64_t size_ = 0;  // if a function reads them
  Read read_;
  std::string version_;
  int ahead_ = 0;
  Order order_;  // empty: a permutation
  std::string order_version_;
};

}  // namespace lockstep
