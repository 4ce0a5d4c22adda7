// Makes Samples of a dataset of LibTorch's torch::data, for batches() and fit(). Its samples then come in lockstep's
// order, on lockstep's ranks.
//
//   auto dataset = torch::data::datasets::MNIST("mnist").map(torch::data::transforms::Normalize<>(0.13, 0.31));
//   const lockstep::Samples samples = lockstep::samples_of(dataset, "MNIST").read_ahead(2);
//
// Give the dataset and not a DataLoader, which has an order of its own. Copies of the dataset are made as needed, one
// for each thread that reads at the same time, as LibTorch's DataLoader does. A transform that draws random numbers
// from LibTorch's generator gives other ones on each run.
#pragma once

#include <ATen/ops/stack.h>
#include <c10/util/ArrayRef.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/samples.hpp>

#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {
namespace detail {

// Says that samples_of() can take a dataset: it has get_batch(numbers), and a size() that is known.
template <class TorchDataset>
concept IndexedDataset = std::copyable<TorchDataset> &&
    requires(TorchDataset& dataset, const std::vector<size_t>& numbers, c10::ArrayRef<size_t> indices) {
  dataset.get_batch(indices);
  dataset.size().has_value();
};

// Keeps copies of a dataset. One thread at a time uses a copy. Thread-safe.
template <IndexedDataset TorchDataset>
class DatasetCopies {
 public:
  explicit DatasetCopies(TorchDataset dataset) : original_(std::move(dataset)) {}

  auto get_batch(const std::vector<int64_t>& numbers) {
    const std::vector<size_t> indices(numbers.begin(), numbers.end());
    std::unique_ptr<TorchDataset> mine = taken();
    auto batch = mine->get_batch(c10::ArrayRef<size_t>(indices));
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(mine));
    return batch;
  }

 private:
  std::unique_ptr<TorchDataset> taken() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<TorchDataset>(original_);
    std::unique_ptr<TorchDataset> last = std::move(free_.back());
    free_.pop_back();
    return last;
  }

  std::mutex mutex_;
  const TorchDataset original_;
  std::vector<std::unique_ptr<TorchDataset>> free_;  // guarded by mutex_
};

// Stacks an Example's tensors, or those of a list of Examples. Give a `collate` for a batch of another type.
struct CollateExamples {
  template <class Batch>
  Dataset operator()(Batch batch) const {
    if constexpr (requires { Dataset{batch.data, batch.target}; }) {
      return {batch.data, batch.target};
    } else {
      static_assert(
          requires {
            Dataset{batch.begin()->data, batch.begin()->target};
          },
          "the dataset's batches are no Examples of two tensors; give samples_of() a function that makes a Dataset of "
          "such a batch");
      std::vector<at::Tensor> data, targets;
      for (auto& example : batch) {
        data.push_back(example.data);
        targets.push_back(example.target);
      }
      return {at::stack(data), at::stack(targets)};
    }
  }
};

}  // namespace detail

// Makes Samples of the dataset. `collate` makes a Dataset of the result of get_batch(): it may put masks and other
// tensors into Dataset::more. `version` is as in Samples. Throws Error for a dataset that does not know its size.
template <detail::IndexedDataset TorchDataset, class Collate>
requires(!std::convertible_to<Collate, std::string>) Samples
    samples_of(TorchDataset dataset, Collate collate, std::string version = {}) {
  const auto size = dataset.size();
  if (!size.has_value()) {
    throw Error(
        "samples_of: the dataset does not know its size, so its samples have no numbers; give one with a size()");
  }
  auto copies = std::make_shared<detail::DatasetCopies<TorchDataset>>(std::move(dataset));
  return {static_cast<int64_t>(*size),
          [copies, collate = std::move(collate)](const std::vector<int64_t>& numbers) {
            return collate(copies->get_batch(numbers));
          },
          std::move(version)};
}

template <detail::IndexedDataset TorchDataset>
Samples samples_of(TorchDataset dataset, std::string version = {}) {
  return samples_of(std::move(dataset), detail::CollateExamples(), std::move(version));
}

}  // namespace lockstep
