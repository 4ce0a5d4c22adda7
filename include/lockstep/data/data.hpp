// Data: loads image sets as tensors, and cuts them into the batches that one partner of a run gets.
//
// The images stay uint8, as in the files. Fashion-MNIST's training set takes 47 MB, once per process: copies of a
// Dataset share its tensors. A batch becomes float when it is gathered. Thread-safe for reading. This header knows
// ranks only as an index and a count.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <lockstep/data/samples.hpp>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// Holds an image set on the CPU. A process reads the images once, and ranks on the CPU share the tensors.
struct ImageData {
  Dataset train;           // the samples to train on
  Dataset test;            // the samples to measure accuracy on
  std::string source;      // where the images come from, in words: a folder, or "synthetic (...)"
  bool synthetic = false;  // the images are made up; say so wherever you show results
};

// Loads Fashion-MNIST from `dir`: four IDX files, gzipped or plain. An empty `dir` means the places of Debian's package
// dataset-fashion-mnist and of `lockstep fetch-data`. Gives train [60000, 1, 28, 28] and test [10000, 1, 28, 28], with
// 10 classes. Throws Error, which names the file and what is wrong: a folder without the files, corrupt gzip, a wrong
// magic number, truncated or trailing bytes, images that are not 28 x 28, counts of images and labels that differ, or a
// label above 9.
ImageData load_fashion_mnist(const std::filesystem::path& dir = {});

struct WholeBatch;  // private: src/data/whole_batch.hpp

struct Batch {
  // Holds the half-open range [begin, end) of samples that one part of a batch has.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t size() const { return end - begin; }
  };

  at::Tensor x;             // this partner's samples on its device; uint8 pixels in memory come as float32 in [0, 1]
  at::Tensor y;             // this partner's targets on its device
  int64_t global_size = 0;  // the number of samples of the whole batch, over all partners
  int64_t first = -1;       // where these samples begin in the whole batch; -1: as near-equal parts lie
  int32_t mark = 0;         // batches() gives all parts of one whole batch one mark, and others another; 0: not known
  int64_t grain = 0;        // the batch's BatchOptions::grain; if it is not 0, these samples are whole grains
  std::vector<int64_t> runs =
      {};                      // with a grain: partner s has grains runs[s] up to runs[s + 1]; empty: near-equal runs
  Dataset::Tensors more = {};  // this partner's rows of Dataset::more, on its device
  // For a part by in_parts() with a grain: the most grains of it that any partner has. 0: a whole batch, see `runs`.
  int64_t turns = 0;
  // An example, one sample of the data, if there is a grain and this partner got no sample. A net with
  // Sharded::parameters computes it. So if you change x, y or `more`, as by flatten(1) or to(), change like's too.
  Dataset like = {};
  // These are for a loss that is a mean over something else than samples (MeanOver). `whole` has the batch that
  // in_parts() has cut, and `part` is the number of this part of it. `samples_per_count` is float64 [] on the batch's
  // device: the whole batch's samples, divided by what is counted in it. Undefined: it is not known yet.
  std::shared_ptr<WholeBatch> whole = {};
  int64_t part = 0;
  at::Tensor samples_per_count = {};

  int64_t size() const { return x.size(0); }  // this partner's samples; 0 if it got none

  // Gives the tensor of this name in `more`. Throws Error, which lists all names.
  const at::Tensor& operator[](const std::string& name) const;

  // Cuts the batch into `count` near-equal parts, to be computed one after the other. Fewer samples make fewer parts,
  // but at least one. With a grain, parts are whole grains, and all partners get as many parts as the partner with the
  // most grains. The other partners' last parts are smaller, or empty. Throws Error if count < 1.
  std::vector<Batch> in_parts(int64_t count) const;

  // These functions need a grain. grains() gives the number of grains in the whole batch, and most_grains() the number
  // that the partner with the most has. own_grains() gives the numbers of this partner's grains, and of_grain() one of
  // them as a Batch. Such a Batch has memory of its own, since the place of samples must not change the results.
  int64_t grains() const { return (global_size + grain - 1) / grain; }
  int64_t most_grains() const;
  Range own_grains() const {
    return {first / grain, size() == 0 ? first / grain : (first + size() + grain - 1) / grain};
  }
  Batch of_grain(int64_t number) const;
};

class BatchUpload;  // brings batches of data on the CPU to a GPU
class ReadAhead;    // reads batches in time, where a function reads the samples
class RowNumbers;   // says to a CUDA graph which rows a batch has

struct BatchOptions {
  int64_t size = 256;  // the number of samples of the global batch; the last batch of an epoch may be smaller
  // Leaves out a last batch that is smaller. With `shuffle` each epoch leaves out other samples.
  bool drop_last = false;
  uint64_t seed = 0;  // the seed and `epoch` alone decide the order
  int64_t epoch = 0;
  bool shuffle = true;
  std::vector<double> shares = {};  // the shares of each batch, in any unit, one per part; empty: near-equal parts
  // The number of samples per grain; 0: no grains. Parts are whole grains. Grain i has samples [i * grain, (i + 1) *
  // grain) of the global batch; the last grain may be smaller. DataParallel and SplitModel compute each grain alone,
  // and add grains in one order. So training gives the same bits on any number of ranks (docs/same-bits.md).
  int64_t grain = 0;
  // The first batch of the iteration, where a resumed epoch goes on. Earlier batches are not read.
  int64_t start = 0;
};

// Gives one partner's part of every global batch of one epoch, in order: for (auto& batch : batches(...)). All partners
// see the same sequence of global batches, whatever the number of partners. Making a Batches draws one permutation,
// which takes about 1 ms for 60000 samples. Without shuffling a batch may share the dataset's memory. Keep a Batches
// alive as long as its iterators; but iterators of a temporary keep the temporary alive.
//
// If the data are on the CPU and the partner is on a CUDA GPU, nobody waits for the copies, which have a stream of
// their own. When an iterator moves to a batch, the copy of the next one begins. So the GPU holds two batches, and a
// batch has the rows as of the copy's beginning. A batch is for the stream that is current when the iterator moves to
// it.
class Batches {
 public:
  // Says which of `count` equal partners this is, and where it computes. Data handling needs no more of a rank.
  struct Partner {
    int index = 0;
    int count = 1;
    c10::Device device = c10::Device(c10::kCPU);
  };

  Batches(Samples samples, const BatchOptions& options, const Partner& partner);

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    Batch& operator*() & { return batch_; }
    Batch operator*() && { return std::move(batch_); }  // no reference: the batch ends with a temporary iterator
    Batch* operator->() { return &batch_; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(const Iterator& other) const { return index_ == other.index_; }

   private:
    friend class Batches;
    Iterator(const Batches* owner, int64_t index, std::shared_ptr<const Batches> kept = nullptr);
    void load();

    std::shared_ptr<const Batches> kept_;  // null: the caller keeps the Batches alive
    const Batches* owner_;
    int64_t index_;
    Batch batch_;
  };

  Iterator begin() const& { return {this, options_.start}; }
  Iterator begin() &&;
  Iterator end() const { return {this, count()}; }
  int64_t count() const;  // the number of global batches of the epoch, with those before BatchOptions::start

  // Changes the shares, from the next batch to which an iterator moves. Set the same shares at the same batch on all
  // partners. Throws Error as batches() does.
  void set_shares(std::vector<double> shares);

 private:
  friend class RowNumbers;
  struct Place {  // where a batch lies among the samples, and this partner's part in the batch
    int64_t begin, global_size;
    std::vector<int64_t> runs;
    Batch::Range part;
  };
  Place place_of(int64_t index) const;
  Batch get(int64_t index) const;
  Dataset gathered(const Place& place) const;
  Dataset gathered_now(int64_t begin, int64_t size) const;
  at::Tensor rows_now(const at::Tensor& data, int64_t begin, int64_t size) const;
  Dataset read(const Place& place, int64_t index) const;
  std::vector<int64_t> numbers_of(const Place& place) const;
  void read_ahead(int64_t index) const;
  void start(const Place& place) const;
  int32_t mark_of(int64_t index) const;
  std::vector<int64_t> runs_of(int64_t global_size) const;

  Samples samples_;
  BatchOptions options_;
  Partner partner_;
  at::Tensor order_;     // int64 [n]: the numbers of the samples in order; undefined without shuffle
  uint64_t source_ = 0;  // tells an own order, or a version, from others; 0: there is neither
  std::shared_ptr<BatchUpload>
      upload_;                        // null: the data are not on the CPU, are where the partner computes, or are read
  std::shared_ptr<ReadAhead> ahead_;  // null: nothing is read, or nothing ahead
  std::shared_ptr<RowNumbers> numbers_;  // null: no graph gathers
};

using Partner [[deprecated("lockstep::Batches::Partner")]] = Batches::Partner;

// Makes batches of a data set. Throws Error: size < 1; the grain is below 0 or above size; start is below 0 or above
// the number of batches; the tensors differ in length or device; x is uint8 and has less than 3 dimensions; the
// partner's index is outside its count; the shares are not one per partner, or one is below 0 or not finite, or all are
// 0. Throws also as Samples::order() does.
Batches batches(const Dataset& dataset, const BatchOptions& options, const Batches::Partner& partner = {});

// Makes batches of samples that a function may read. The function is called for this partner's samples alone, and for
// one sample where the partner gets none of a batch. Throws Error as above and, when an iterator moves, as
// Samples::read() does.
Batches batches(const Samples& samples, const BatchOptions& options, const Batches::Partner& partner = {});

// Says, as a compile error of batches(data, 256, rank), what to write instead.
template <std::integral Size>
Batches batches(const Samples& samples, Size size, const Batches::Partner& partner = {}) {
  static_assert(sizeof(Size) == 0, "batches() takes options: batches(data, {.size = 256, .epoch = epoch}, rank).");
  return batches(samples, BatchOptions{.size = size}, partner);
}

}  // namespace lockstep
