// Moves the iterator over Batches, notes the batch in use, and finds a data set that was changed in place meanwhile.
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>

#include <cstdint>
#include <utility>
#include <vector>

#include "batch_tensors.hpp"
#include "latest_batch.hpp"

namespace lockstep {
namespace {

// Counts the writes to each tensor. A batch that shares a tensor's memory has the same count.
std::vector<uint32_t> versions_of(const Dataset& data) {
  std::vector<uint32_t> versions;
  each_tensor(data, [&](const at::Tensor& tensor) {
    versions.push_back(tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version()));
  });
  return versions;
}

std::vector<bool> shares_memory(const Batch& batch, const Dataset& data) {
  std::vector<bool> shares;
  std::vector<at::Tensor> rows;
  each_tensor(batch, [&](const at::Tensor& tensor) { rows.push_back(tensor); });
  each_tensor(data, [&](const at::Tensor& tensor) {
    const bool is_there = shares.size() < rows.size() && rows[shares.size()].defined();
    shares.push_back(is_there && rows[shares.size()].is_alias_of(tensor));
  });
  return shares;
}

// Refuses data that were changed in place. Without shuffling a batch is a view of the data set, so an in-place
// operation would change the data again in each epoch.
void check_unchanged(const Batch& batch, const Dataset& data) {
  const auto noted = versions_of_batch(batch);
  if (noted.empty()) return;
  const auto now = versions_of(data);
  const auto shares = shares_memory(batch, data);
  for (size_t i = 0; i < noted.size() && i < now.size(); ++i) {
    if (!shares[i] || now[i] == noted[i]) continue;
    throw Error(
        "batches: the data set was changed in place while a batch of it was in use. Without shuffling a batch shares "
        "the data set's memory, so an operation such as batch.x.div_(2) changes the data too. Take batch.x = "
        "batch.x.div(2), or clone() it first; change the data set itself before the iteration");
  }
}

}  // namespace

Batches::Iterator::Iterator(const Batches* owner, int64_t index, std::shared_ptr<const Batches> kept)
    : kept_(std::move(kept)), owner_(owner), index_(index) {
  load();
}

Batches::Iterator& Batches::Iterator::operator++() {
  if (owner_->samples_.in_memory()) check_unchanged(batch_, owner_->samples_.tensors());
  ++index_;
  load();
  return *this;
}

void Batches::Iterator::load() {
  if (index_ >= owner_->count()) {
    batch_ = {};
    return;
  }
  batch_ = owner_->get(index_);
  const bool in_memory = owner_->samples_.in_memory();
  note_batch(batch_, owner_->partner_.count,
             in_memory ? versions_of(owner_->samples_.tensors()) : std::vector<uint32_t>());
}

}  // namespace lockstep
