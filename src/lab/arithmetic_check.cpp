#include "arithmetic_check.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/lab/check_arithmetic.hpp>

#include "base/number_text.hpp"
#include "base/scramble.hpp"
#include "data/batch_tensors.hpp"
#include "data_parallel/grain_statistics.hpp"
#include "data_parallel/replica_check.hpp"
#include "data_parallel/tensor_hash.hpp"
#include "nn/weighed_backward.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace lockstep {
namespace {

constexpr uint64_t kDraws = 0x6172697468;  // sets these draws apart from other draws of the same seed

// Gives `count` columns of row `rank` of all ranks' table, from column `begin` on.
GrainHashes hashes_in_row(const at::Tensor& table, int rank, size_t begin, size_t count) {
  const int64_t* const row = table.const_data_ptr<int64_t>() + rank * table.size(1) + static_cast<int64_t>(begin);
  return {row, row + count};
}

}  // namespace

std::vector<CheckedGrain> drawn_grains(double fraction, uint64_t seed, int64_t step, const std::vector<int64_t>& runs) {
  const int ranks = static_cast<int>(runs.size()) - 1;
  if (ranks < 2) return {};
  const auto drawn = [&](uint64_t what, int of) {
    return mix({seed, kDraws, static_cast<uint64_t>(step), what, static_cast<uint64_t>(of)});
  };
  const double rest = static_cast<double>(drawn(0, 0) >> 11) * 0x1p-53;  // from 0 to below 1
  const int distance = 1 + static_cast<int>(drawn(1, 0) % static_cast<uint64_t>(ranks - 1));
  std::vector<CheckedGrain> grains;
  for (int owner = 0; owner < ranks; ++owner) {
    const int64_t begin = runs[static_cast<size_t>(owner)], size = runs[static_cast<size_t>(owner) + 1] - begin;
    if (size == 0) continue;
    const auto count = std::min(size, static_cast<int64_t>(std::floor(fraction * static_cast<double>(size) + rest)));
    const auto first = static_cast<int64_t>(drawn(2, owner) % static_cast<uint64_t>(size));
    for (int64_t i = 0; i < count; ++i) {
      grains.push_back({begin + (first + i) % size, owner, (owner + distance) % ranks});
    }
  }
  return grains;
}

std::vector<int> wrong_ranks(const CheckedGrain& grain, const GrainHashes& owners, const GrainHashes& checkers,
                             const std::vector<GrainHashes>& again) {
  const auto has_majority = [&](const GrainHashes& hashes) {
    return 2 * std::count(again.begin(), again.end(), hashes) > static_cast<std::ptrdiff_t>(again.size());
  };
  const auto right = std::find_if(again.begin(), again.end(), has_majority);
  if (right == again.end()) return {};
  std::set<int> wrong;
  if (owners != *right) wrong.insert(grain.owner);
  if (checkers != *right) wrong.insert(grain.checker);
  for (size_t rank = 0; rank < again.size(); ++rank) {
    if (again[rank] != *right) wrong.insert(static_cast<int>(rank));
  }
  return {wrong.begin(), wrong.end()};
}

std::shared_ptr<GrainCheck> check_arithmetic(double fraction) {
  return std::make_shared<ArithmeticCheck>(fraction);
}

ArithmeticCheck::ArithmeticCheck(double fraction) : fraction_(fraction) {
  if (fraction > 0 && fraction <= 1) return;
  throw Error("check_arithmetic is " + number_text(fraction) +
              "; it is the fraction of the grains that is computed again, above 0 and at most 1");
}

void ArithmeticCheck::watch(const torch::nn::Module& module, const Rank& rank) {
  if (taken_.exchange(true)) {
    throw Error(rank.name() +
                ": check_arithmetic: it is another DataParallel's already; make one for each net and rank");
  }
  module_ = &module;
  rank_.emplace(rank);
  parameters_ = parameters_of(module);
  for (const auto& [name, parameter] : parameters_)
    places_.emplace(parameter.unsafeGetTensorImpl(), places_.size() + 1);
}

// ---- What this rank computes for the step.

void ArithmeticCheck::begin(const Batch& part, const SampleScope::Place& place, const MeanOf& mean_of) {
  drawn_ = drawn_grains(fraction_, place.seed, place.step, part.runs);
  if (drawn_.empty()) return;
  part_ = part;
  place_ = place;
  mean_of_ = mean_of;
  autocast_ = at::autocast::is_autocast_enabled(rank_->device().type());
  autocast_type_ = at::autocast::get_autocast_dtype(rank_->device().type());
  const Range own = part.own_grains();
  for (const auto& drawn : drawn_) {
    if (drawn.owner != rank_->index() || drawn.number < own.begin || drawn.number >= own.end) continue;
    notes_[drawn.number] = {part.of_grain(drawn.number), GrainHashes(parameters_.size() + 1, 0)};
  }
}

void ArithmeticCheck::note(int64_t grain, const at::Tensor& parameter, const at::Tensor& value) {
  const auto found = notes_.find(grain);
  if (found == notes_.end()) return;
  found->second.hashes[parameter.defined() ? places_.at(parameter.unsafeGetTensorImpl()) : 0] = tensor_hash(value);
}

// ---- What ranks compute again.

void ArithmeticCheck::compare() {
  const Notes notes = std::exchange(notes_, {});
  const MeanOf mean_of = std::exchange(mean_of_, nullptr);
  if (drawn_.empty()) return;
  const std::vector<Batch> grains = samples_of_all(notes);
  const size_t columns = parameters_.size() + 1;
  std::vector<int64_t> row;
  for (size_t i = 0; i < drawn_.size(); ++i) {
    GrainHashes hashes(columns, 0);
    if (drawn_[i].owner == rank_->index()) hashes = notes.at(drawn_[i].number).hashes;
    if (drawn_[i].checker == rank_->index()) hashes = compute(grains[i], mean_of);
    row.insert(row.end(), hashes.begin(), hashes.end());
  }
  const at::Tensor table = of_all_ranks(*rank_, row).contiguous();
  for (size_t i = 0; i < drawn_.size(); ++i) {
    const GrainHashes owners = hashes_in_row(table, drawn_[i].owner, i * columns, columns);
    const GrainHashes checkers = hashes_in_row(table, drawn_[i].checker, i * columns, columns);
    if (owners != checkers) decide(drawn_[i], grains[i], owners, checkers, mean_of);
  }
  part_ = {};
}

// Gives the samples the strides that their owners' have, since kernels are chosen by the strides.
std::vector<Batch> ArithmeticCheck::samples_of_all(const Notes& notes) {
  std::vector<int64_t> strides;  // strides of each tensor in turn; 0: this rank computed no drawn grain
  each_tensor(notes.empty() ? part_ : notes.begin()->second.grain, [&](const at::Tensor& tensor) {
    for (int64_t i = 0; i < tensor.dim(); ++i) strides.push_back(notes.empty() ? 0 : tensor.stride(i));
  });
  const at::Tensor of_ranks = of_all_ranks(*rank_, strides).contiguous();
  std::vector<Batch> grains;
  for (const CheckedGrain& drawn : drawn_) {
    Batch grain = drawn.owner == rank_->index() ? notes.at(drawn.number).grain : part_;
    grain.first = drawn.number * grain.grain;
    const int64_t rows = std::min(grain.grain, grain.global_size - grain.first);
    const int64_t* theirs = of_ranks.const_data_ptr<int64_t>() + drawn.owner * of_ranks.size(1);
    grains.push_back(with_each_tensor(std::move(grain), [&](const at::Tensor& tensor) {
      return sent(tensor, rows, std::exchange(theirs, theirs + tensor.dim()), drawn.owner);
    }));
  }
  return grains;
}

// Sends bytes, since not every backend has every type.
at::Tensor ArithmeticCheck::sent(const at::Tensor& mine, int64_t rows, const int64_t* strides, int owner) {
  if (owner == rank_->index()) {
    rank_->broadcast(mine.detach().contiguous().view({-1}).view(at::kByte), owner);
    return mine;
  }
  auto sizes = mine.sizes().vec();
  sizes[0] = rows;
  const at::Tensor plain = at::empty(sizes, mine.options().memory_format(at::MemoryFormat::Contiguous));
  rank_->broadcast(plain.view({-1}).view(at::kByte), owner);
  const c10::IntArrayRef wanted(strides, sizes.size());
  return plain.strides() == wanted ? plain : at::empty_strided(sizes, wanted, plain.options()).copy_(plain);
}

// Computes as Replica does, but leaves nothing behind: neither gradients in .grad nor other running statistics.
GrainHashes ArithmeticCheck::compute(const Batch& grain, const MeanOf& mean_of) {
  const c10::AutoGradMode with_grad(true);
  SampleScope::Place place = place_;
  place.first = grain.first;
  place.size = grain.size();
  place.again = true;
  at::Tensor mean;
  GrainStatistics dropped(*module_, *rank_);
  dropped.forward(grain.own_grains().begin, [&] {
    const Autocast as_before(rank_->device(), autocast_type_, autocast_);
    const SampleScope scope(place);
    mean = mean_of(grain);
  });
  GrainHashes hashes(parameters_.size() + 1, 0);
  hashes[0] = tensor_hash(mean);
  std::vector<at::Tensor> trained;
  for (const auto& [name, parameter] : parameters_) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  if (!mean.requires_grad() || trained.empty()) return hashes;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const WeighedBackward weighed(mean, static_cast<double>(grain.size()), *module_);
  const auto gradients =
      torch::autograd::grad({mean}, trained, {weighed.seed()},
                            /*retain_graph=*/std::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
  for (size_t i = 0; i < trained.size(); ++i) {
    if (!gradients[i].defined()) continue;
    hashes[places_.at(trained[i].unsafeGetTensorImpl())] = tensor_hash(weighed.weighed(gradients[i]));
  }
  return hashes;
}

// ---- When two ranks differ.

void ArithmeticCheck::decide(const CheckedGrain& checked, const Batch& grain, const GrainHashes& owners,
                             const GrainHashes& checkers, const MeanOf& mean_of) {
  const auto& place = comm::RankPlace::of(*rank_);
  const GrainHashes mine = compute(grain, mean_of);
  std::vector<int64_t> row = mine;
  uint64_t weights = 0;
  for (const auto& [name, parameter] : parameters_)
    weights = mix({weights, static_cast<uint64_t>(tensor_hash(parameter))});
  row.push_back(static_cast<int64_t>(weights));
  row.push_back(place.world_rank);
  const at::Tensor table = of_all_ranks(*rank_, row).contiguous();
  std::vector<GrainHashes> again;
  std::vector<std::string> names;
  std::set<int64_t> different_weights;
  for (int rank = 0; rank < rank_->world_size(); ++rank) {
    again.push_back(hashes_in_row(table, rank, 0, mine.size()));
    const GrainHashes rest = hashes_in_row(table, rank, mine.size(), 2);
    different_weights.insert(rest[0]);
    names.push_back(comm::name_of(static_cast<int>(rest[1]), place.run->devices));
  }
  const std::vector<int> wrong = wrong_ranks(checked, owners, checkers, again);
  std::string text = rank_->name() + ": check_arithmetic: grain " + std::to_string(checked.number) + " of step " +
                     std::to_string(place_.step + 1) + ": ";
  if (wrong.empty()) {
    text += joined_names(std::vector<int>{checked.owner, checked.checker}, names) + " get different bits in " +
            difference(owners, checkers) + ", also when they compute it again, so it is not known which is wrong" +
            (again.size() == 2 ? "; a third rank would decide" : "");
  } else {
    text += joined_names(wrong, names) + (wrong.size() == 1 ? " computes" : " compute") +
            " wrongly: " + difference(owners, checkers) + (wrong.size() == 1 ? " differs" : " differ") +
            " from what most ranks get when all compute it again";
  }
  if (different_weights.size() > 1) {
    text += ". The ranks' weights differ too (see check_replicas), so suspect the memory first";
  }
  if (!place.run->mixed_processors.empty()) {
    throw Error(
        text + ". That is to be expected of another kind of processor: " + place.run->mixed_processors +
            ", and the same products round otherwise there. Take processors of one kind; then this check finds " +
            "faulty cores and memory",
        {Error::machine, wrong});
  }
  throw Error(text + ". The core or the memory is faulty: look for hardware errors in the machine's log, leave that " +
                  "core or machine out, and go on from the last checkpoint",
              {Error::machine, wrong});
}

std::string ArithmeticCheck::difference(const GrainHashes& one, const GrainHashes& other) const {
  if (one[0] != other[0]) return "the loss";
  size_t first = 1;
  while (first + 1 < one.size() && one[first] == other[first]) ++first;
  return "the gradient of " + parameters_[first - 1].first;
}

}  // namespace lockstep
