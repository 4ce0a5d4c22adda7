// Batch: cuts a batch into parts and grains, and finds its other tensors.
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "batch_tensors.hpp"
#include "parts.hpp"
#include "whole_batch.hpp"

namespace lockstep {
namespace {

// Copies rows to where a tensor of their own would begin, as far as kernels care. CPU kernels look at 64 bytes, the
// vectors of AVX-512, and a GPU's at more. So a grain's bits do not depend on its place in the batch.
at::Tensor aligned_rows(const at::Tensor& tensor, int64_t begin, int64_t end) {
  const at::Tensor rows = tensor.slice(0, begin, end);
  const auto address = reinterpret_cast<std::uintptr_t>(rows.const_data_ptr());
  return rows.is_cpu() && address % 64 == 0 ? rows : rows.clone();
}

}  // namespace

const at::Tensor& Batch::operator[](const std::string& name) const {
  const auto found = more.find(name);
  if (found != more.end()) return found->second;
  std::string names;
  for (const auto& [other, tensor] : more) names += (names.empty() ? "\"" : ", \"") + other + "\"";
  throw Error("Batch: there is no tensor \"" + name + "\" beside x and y; " +
              (names.empty() ? "the data have no others (Dataset::more)" : "the data have " + names));
}

std::vector<Batch> Batch::in_parts(int64_t count) const {
  if (count < 1)
    throw Error("Batch::in_parts: the number of parts is " + std::to_string(count) + "; expected 1 or more");
  const int64_t unit = std::max<int64_t>(grain, 1), own = (size() + unit - 1) / unit;
  const int64_t units = grain > 0 ? std::max(own, most_grains()) : own;
  const int64_t parts = std::clamp<int64_t>(units, 1, count);
  const auto cut_from = whole ? whole : std::make_shared<WholeBatch>(WholeBatch{.batch = *this});
  std::vector<Batch> batches;
  for (int64_t i = 0; i < parts; ++i) {
    const Range part = part_of(units, static_cast<int>(i), static_cast<int>(parts));
    const int64_t begin = std::min(part.begin * unit, size()), end = std::min(part.end * unit, size());
    Batch cut = with_each_tensor(*this, [&](const at::Tensor& tensor) { return tensor.slice(0, begin, end); });
    cut.whole = cut_from;
    cut.part = this->part * parts + i;
    if (first >= 0) cut.first = first + begin;
    if (grain > 0) cut.turns = part.size();
    if (grain > 0 && begin == end && size() > 0) {
      cut.like = with_each_tensor(Dataset{x, y, more}, [](const at::Tensor& tensor) { return tensor.slice(0, 0, 1); });
    }
    batches.push_back(std::move(cut));
  }
  return batches;
}

int64_t Batch::most_grains() const {
  int64_t most = turns;
  for (size_t partner = 1; turns == 0 && partner < runs.size(); ++partner)
    most = std::max(most, runs[partner] - runs[partner - 1]);
  return most;
}

Batch Batch::of_grain(int64_t number) const {
  const int64_t begin = number * grain - first, end = std::min(begin + grain, size());
  if (grain < 1 || begin < 0 || begin >= end) {
    throw Error("Batch::of_grain: there is no grain " + std::to_string(number) + " of " + std::to_string(grain) +
                " samples among the " + std::to_string(size()) + " samples from sample " + std::to_string(first) +
                " on");
  }
  Batch one = with_each_tensor(*this, [&](const at::Tensor& tensor) { return aligned_rows(tensor, begin, end); });
  one.first = number * grain;
  return one;
}

}  // namespace lockstep
