#include "backward_report.hpp"

#include <ATen/ops/empty.h>
#include <lockstep/base/error.hpp>

#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "tensor_hash.hpp"

#include <algorithm>

namespace lockstep {
namespace {

constexpr int64_t kCompared = 256;  // so many values take less than a microsecond

// Gives the same on every machine. The hashes of all ranks travel as a sum with zeros.
int64_t hash_of_frozen(const std::vector<GradientSlot>& slots) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const auto& slot : slots) hash = (hash ^ (slot.parameter.requires_grad() ? 0u : 1u)) * 1099511628211u;
  return static_cast<int64_t>(hash);
}

}  // namespace

void BackwardReport::post(const std::vector<GradientSlot>& slots, const PartSizes& sizes,
                          const GradientSlot* compared) {
  parameters_ = slots.size();
  const int64_t hash = hash_of_frozen(slots);
  if (std::exchange(frozen_, hash) != hash && ++changes_ <= kChecksOnGpu) checked_ = 0;
  const bool on_gpu = !rank_.device().is_cpu();
  const int64_t numbers = size(parameters_, rank_.world_size());
  if (on_gpu || on_host_.numel() != numbers) {  // a GPU may still copy the one before, and the host waits for no copy
    on_host_ = at::empty({numbers}, at::TensorOptions(at::kLong).pinned_memory(on_gpu));
  }
  auto* const cells = on_host_.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < parameters_; ++i) cells[i] = slots[i].had ? 1 : 0;
  std::fill(cells + parameters_, cells + numbers, 0);
  auto* const mine = cells + parameters_ + static_cast<size_t>(kNumbers * rank_.index());
  mine[0] = sizes.local;
  mine[1] = sizes.accumulated;
  mine[2] = sizes.global;
  mine[3] = sizes.mark;
  compared_ = compared;
  mine[4] = digest();
  mine[5] = frozen_;
  ++posted_;
  if (rank_.world_size() == 1) return;
  table_ = on_host_;
  if (on_gpu) table_ = std::exchange(on_host_, {}).to(rank_.device(), at::kLong, /*non_blocking=*/true);
  work_ = CommunicationHook::post_allreduce(rank_, table_, c10d::ReduceOp::SUM);
}

void BackwardReport::wait() {
  if (work_) work_->wait();
  work_.reset();
  if (!reads_all()) return;
  ++checked_;
  const int64_t* const parts = cells() + parameters_;
  check_sizes(parts);
  check_marks(parts);
  check_frozen(parts);
  check_networks(parts);
}

bool BackwardReport::reads_all() const {
  return rank_.device().is_cpu() || checked_ < kChecksOnGpu;
}

// The digest covers a few values, at another place each time that the parameter's turn comes. A digest of 0 says
// nothing: there is nothing to compare, or reading would cost too much.
int32_t BackwardReport::digest() const {
  if (rank_.world_size() == 1 || !reads_all() || compared_ == nullptr) return 0;
  const at::Tensor& values = compared_->parameter;
  if (!values.is_contiguous() || values.numel() == 0) return 0;
  const int64_t begin = posted_ * kCompared % values.numel();
  const at::Tensor few = values.detach().view({-1}).narrow(0, begin, std::min(kCompared, values.numel() - begin));
  return static_cast<int32_t>(static_cast<uint64_t>(tensor_hash(few)) >> 33) | 1;
}

bool BackwardReport::any_had(size_t parameter) {
  return cells()[parameter] > 0;
}

void BackwardReport::check_own(const PartSizes& sizes) const {
  const int64_t mine[kNumbers] = {sizes.local, sizes.accumulated, sizes.global};
  check_sizes(mine);
}

const int64_t* BackwardReport::cells() {
  if (!on_host_.defined()) on_host_ = table_.cpu();
  return on_host_.data_ptr<int64_t>();
}

void BackwardReport::check_sizes(const int64_t* sizes) const {
  const int64_t global = sizes[2];
  int64_t local = 0, accumulated = 0;
  bool equal = true, known = true;
  const auto of = [sizes](int rank) { return sizes + static_cast<ptrdiff_t>(kNumbers) * rank; };
  for (int rank = 0; rank < rank_.world_size(); ++rank) {
    local += of(rank)[0];
    accumulated += of(rank)[1];
    equal = equal && of(rank)[2] == global;
    known = known && of(rank)[2] > 0;
  }
  if (!known) return;  // no single Loss made this backward
  // Parts under no_sync() add up to a batch, or to several.
  if (equal && (local == global || (local < global && accumulated > 0 && accumulated % global == 0))) return;
  std::string parts;
  for (int rank = 0; rank < rank_.world_size(); ++rank) {
    parts += (rank == 0 ? "rank " : ", rank ") + std::to_string(rank) + " " + std::to_string(of(rank)[0]) + " of " +
             std::to_string(of(rank)[2]);
  }
  if (!equal) {
    throw Error(name_ + ": the ranks' parts are of global batches of different sizes (" + parts +
                    "). Give all ranks the same data and the same batch size",
                {Error::difference});
  }
  throw Error(
      name_ + ": the ranks' parts have " + std::to_string(local) + " samples together, but their global batch " +
          std::to_string(global) + " (" + parts + "), so the gradients would be wrong by that factor. " +
          "Split each batch over the ranks that average: batches(…, rank) with the rank that this DataParallel " +
          "was given, or a mesh's data axis; parts that add up go under no_sync(), all but the last",
      {Error::difference});
}

// A batch of the user's own has no mark.
void BackwardReport::check_marks(const int64_t* parts) const {
  int first = -1;
  std::string others;
  std::vector<int> wrong;
  const auto mark = [parts](int rank) { return parts[static_cast<ptrdiff_t>(kNumbers) * rank + 3]; };
  for (int rank = 0; rank < rank_.world_size(); ++rank) {
    if (mark(rank) == 0) continue;
    if (first < 0) first = rank;
    if (mark(rank) == mark(first)) continue;
    others += (others.empty() ? "" : ", ") + std::to_string(rank);
    wrong.push_back(rank);
  }
  if (others.empty()) return;
  throw Error(
      name_ + ": the ranks' parts are of different batches: rank " + others + " has another one than rank " +
          std::to_string(first) +
          ", so samples are missing and others count twice. Give batches() the same data, seed, epoch and shuffle "
          "on all ranks, and take as many batches everywhere",
      {Error::difference, wrong});
}

// With a grain a parameter that one rank froze would move on by the other ranks' samples alone.
void BackwardReport::check_frozen(const int64_t* parts) const {
  for (int rank = 1; rank < rank_.world_size(); ++rank) {
    if (parts[static_cast<ptrdiff_t>(kNumbers) * rank + 5] == parts[5]) continue;
    throw Error(name_ + ": rank " + std::to_string(rank) +
                    " has frozen other parameters than rank 0, and their gradients lack its samples. Call "
                    "requires_grad_() alike on all ranks",
                {Error::difference, {0, rank}});
  }
}

void BackwardReport::check_networks(const int64_t* parts) {
  const auto digest = [parts](int rank) { return parts[static_cast<ptrdiff_t>(kNumbers) * rank + 4]; };
  int other = 1;
  while (other < rank_.world_size() && digest(other) == digest(0)) ++other;
  if (other >= rank_.world_size()) return;
  const std::string text =
      ": the ranks' networks differ: " + compared_->name + " of rank " + std::to_string(other) +
      " is not that of rank 0. " +
      "Load weights before the DataParallel is made, or on all ranks; call step() on all ranks, with the same " +
      "settings; what follows a loss, such as a learning rate, must follow Loss::global_item()";
  const comm::RankPlace& place = comm::RankPlace::of(rank_);
  if (place.run->ranks_here.size() == static_cast<int64_t>(place.run->devices.size()))
    throw Error(name_ + text, {Error::difference, {0, other}});
  if (rank_.index() == 0 && !has_warned_) {
    place.warn("DataParallel" + text + ". If the processes' CPUs are of different kinds, so may be the last bits");
  }
  has_warned_ = true;
}

}  // namespace lockstep
