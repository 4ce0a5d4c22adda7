// Samples: holds the data of which batches are made: tensors in memory, or a function that reads samples by their
// numbers. It also decides the order in which an epoch takes the samples.
//
// Copies share the tensors, and the functions. Thread-safe for reading. Make the functions thread-safe too, since all
// ranks of a process call them at the same time. Cost: a function that reads is called once per batch and rank, or with
// a grain (BatchOptions::grain) once per grain. The rank waits for it, but with read_ahead() another thread calls it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// Holds samples `x` [n, ...] and targets `y` [n, ...]. For images x is uint8 [n, channels, height, width], and y holds
// int64 class indices. `more` are further tensors of the same samples, [n, ...] each: masks, a second input, weights of
// a loss. A batch has their rows under the same names, with the same types.
struct Dataset {
  using Tensors = std::map<std::string, at::Tensor>;  // tensors by their names

  at::Tensor x;
  at::Tensor y;
  Tensors more = {};

  int64_t size() const { return x.size(0); }
  // Returns this Dataset, and shares the memory, if it is on `device` already. Otherwise returns a copy.
  Dataset to(const c10::Device& device) const;
};

using TensorsByName [[deprecated("lockstep::Dataset::Tensors")]] = Dataset::Tensors;

// More than twelve functions: they set the samples, the order and weights, and the reading ahead.
class Samples {
 public:
  // Returns the samples with these numbers, in this order, as tensors with a row for each. With a grain the rows of all
  // samples need one type and one shape.
  using Read = std::function<Dataset(const std::vector<int64_t>& numbers)>;
  // Returns the numbers of an epoch's samples, int64 [size()] on the CPU, each from 0 to below size().
  using Order = std::function<at::Tensor(uint64_t seed, int64_t epoch)>;

  // Says how samples_of() reads files (sample_files.hpp).
  struct FileOptions {
    // The names of the samples and of their targets in the files; the other tensors come as `more`.
    std::string x = "x", y = "y";
    // The size of the shuffle buffer, in samples. An epoch's seed and number alone decide its order. Each epoch takes
    // the files in another order, and their samples in turn through the buffer: a random one leaves, and the next
    // enters. A larger buffer mixes better; a smaller one keeps reads closer together on the disk. 1: the samples stay
    // as they lie in the files. with_weights() and with_order() replace this order; then rows may come from all files
    // at once.
    int64_t shuffle_buffer = 10000;
    int read_ahead = 2;  // the number of batches, see Samples::read_ahead()
    // Changes the rows of a batch, such as bytes to floats. Keep their number. Empty: the rows stay as they are. It is
    // called on the thread that reads ahead.
    std::function<Dataset(Dataset)> transform = {};
  };

  Samples() = default;  // holds no samples
  Samples(Dataset tensors) : tensors_(std::move(tensors)) {}
  // Makes samples 0 to size - 1, which `read` reads. The values stay as read: uint8 does not become float. `version` is
  // any text that tells these samples from others: a resumed run refuses samples of another version or number. Throws
  // Error for a size below 0 or an empty function.
  Samples(int64_t size, Read read, std::string version = {});

  int64_t size() const;
  bool in_memory() const { return !read_; }

  const Dataset& tensors() const { return tensors_; }  // undefined if a function reads them
  const std::string& version() const { return version_; }

  // ---- Copies that differ in one thing

  // Calls the function up to `batches` batches early, on a thread of its own, which each Batches starts and ends. If
  // the function throws, taking the batch throws the same. Tensors in memory are not read, so this changes nothing for
  // them. 0: the thread that takes the batch reads it. Throws Error below 0.
  Samples read_ahead(int batches) const;

  // Replaces the permutation by another order: a sampler. Give one that follows from its arguments alone and is the
  // same on all ranks; backward() refuses unequal orders. `version` tells orders apart, as above. Batches without
  // shuffle, and evaluations, take samples 0, 1, 2, … all the same. Throws Error for an empty function.
  Samples with_order(Order order, std::string version = {}) const;

  // Draws with replacement, size() times per epoch, as PyTorch's WeightedRandomSampler does: for classes of unequal
  // size. On average a sample is drawn as often as its weight says. `weights` is [size()], of any floating or integer
  // type. Throws Error for another size, and for weights that are negative, not finite, or all 0.
  Samples with_weights(const at::Tensor& weights) const;

  // ---- For batches()

  // Reads these samples by the function. With a grain, calls the function for at most `grain` numbers at a time. A
  // sample must have the same bits however its batch is shared out, and a function may round many rows at once
  // otherwise than few. Throws Error if the function does not give a row for each number, or rows of unequal types or
  // shapes.
  Dataset read(const std::vector<int64_t>& numbers, int64_t grain = 0) const;
  int batches_ahead() const { return ahead_; }

  bool has_order() const { return static_cast<bool>(order_); }
  const std::string& order_version() const { return order_version_; }
  // Calls the order's function. Throws Error if it gives no order of size() samples.
  at::Tensor order(uint64_t seed, int64_t epoch) const;

  // Brings tensors in memory to the device; a function stays as it is.
  Samples to(const c10::Device& device) const;

 private:
  Dataset read_at_once(const std::vector<int64_t>& numbers) const;

  Dataset tensors_;
  int64_t size_ = 0;  // the number of samples if a function reads them
  Read read_;
  std::string version_;
  int ahead_ = 0;
  Order order_;  // empty: a permutation
  std::string order_version_;
};

}  // namespace lockstep
