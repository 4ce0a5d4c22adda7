// Data: image sets as tensors, and the batches that a shard of a run gets of them.
//
// The images stay uint8 as the files hold them (47 MB for Fashion-MNIST's training set, once per process: copies of a
// Dataset share its tensors); a batch becomes float when it is gathered. Thread-safe for reading. Knows nothing of
// ranks but an index and a count.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/parts.hpp>

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

// Samples `x` [n, ...] and targets `y` [n, ...]. For images x is uint8 [n, channels, height, width], y int64 class
// indices.
struct Dataset {
  at::Tensor x;
  at::Tensor y;

  int64_t size() const { return x.size(0); }
  // Itself, sharing memory, if it lies there already; otherwise a copy.
  Dataset to(const c10::Device& device) const { return {x.to(device), y.to(device)}; }
};

// An image set as it is read once per process, on the CPU; ranks on the CPU share its tensors.
struct ImageData {
  Dataset train;           // what gradients come from
  Dataset test;            // what accuracy is measured on
  std::string source;      // for people: a folder, or "synthetic (...)"
  bool synthetic = false;  // made up: whatever shows results must say so
};

// Fashion-MNIST from `dir` (four IDX files, gzipped or plain); with an empty `dir` from the places where Debian's
// package dataset-fashion-mnist and `lockstep fetch-data` put it. Train [60000, 1, 28, 28], test [10000, 1, 28, 28], 10
// classes. Throws Error that names the file and what is wrong: a folder without the files, a corrupt gzip, wrong magic,
// truncated or trailing bytes, images that are not 28 x 28, counts of images and labels that differ, a label above 9.
ImageData load_fashion_mnist(const std::filesystem::path& dir = {});

// Where load_fashion_mnist looks when no folder is given, in this order.
std::vector<std::filesystem::path> fashion_mnist_places();

// The last of them, where `lockstep fetch-data` puts the files: lockstep/fashion-mnist in $XDG_DATA_HOME or else in
// ~/.local/share. Empty if neither variable, XDG_DATA_HOME nor HOME, holds an absolute path.
std::filesystem::path fashion_mnist_download_place();

// A stand-in of the same shapes and types that can be learnt: ten random patterns, moved, faded, mixed with each other
// and with noise. Says "synthetic" in `source`. The same seed gives the same bits, on every machine. Throws Error: a
// size below 1.
ImageData synthetic_images(int64_t train_size = 60000, int64_t test_size = 10000, uint64_t seed = 0);

struct Batch {
  at::Tensor x;             // this shard's samples on its device; uint8 data comes as float32 in [0, 1]
  at::Tensor y;             // this shard's targets on its device
  int64_t global_size = 0;  // samples of the whole batch, over all shards
  int64_t first = -1;       // place of the first of these samples in the whole batch; -1: as part_of() cuts it
  int32_t mark = 0;         // from batches(): the same for all parts of one whole batch, for no others; 0: not known

  int64_t size() const { return x.size(0); }  // this shard's samples; 0 if it got none

  // In so many near-equal parts, or fewer if there are fewer samples, but at least one; for computing one after the
  // other. Throws Error: count < 1.
  std::vector<Batch> in_parts(int64_t count) const;
};

struct BatchOptions {
  int64_t size = 256;  // of the global batch; the last one of an epoch may be smaller
  uint64_t seed = 0;   // with `epoch`, alone decides the order
  int64_t epoch = 0;
  bool shuffle = true;
  std::vector<double> shares = {};  // of each batch, one per part (see parts.hpp); empty: near-equal parts
};

// One shard's part of every global batch of one epoch, in order: for (auto& batch : batches(...)).
// All shards see the same sequence of global batches, whatever their number. Making one draws one permutation (about 1
// ms for 60000). Without shuffling a batch may share the dataset's memory. Iterators must not outlive their Batches;
// those of a temporary keep it.
class Batches {
 public:
  Batches(Dataset dataset, const BatchOptions& options, const Partner& shard);

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    Batch& operator*() { return batch_; }
    Batch* operator->() { return &batch_; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(const Iterator& other) const { return index_ == other.index_; }

   private:
    friend class Batches;
    Iterator(const Batches* owner, int64_t index, std::shared_ptr<const Batches> kept = nullptr);
    void load();

    std::shared_ptr<const Batches> kept_;  // null: somebody else keeps it
    const Batches* owner_;
    int64_t index_;
    Batch batch_;
  };

  Iterator begin() const& { return {this, 0}; }
  Iterator begin() &&;
  Iterator end() const { return {this, count()}; }
  int64_t count() const;  // global batches of the epoch

  // Other shares, from the next batch that an iterator goes on to. All shards must set the same at the same batch.
  // Throws Error as batches() does.
  void set_shares(std::vector<double> shares);

 private:
  Batch get(int64_t index) const;
  int32_t mark_of(int64_t index) const;

  Dataset dataset_;
  BatchOptions options_;
  Partner shard_;
  at::Tensor order_;  // int64 [n] on the dataset's device; undefined without shuffle
};

// Throws Error: size < 1, x and y of different length or on different devices, a shard index outside its count, shares
// that check_shares refuses or that are not one per shard.
Batches batches(const Dataset& dataset, const BatchOptions& options, const Partner& shard = {});

}  // namespace lockstep
