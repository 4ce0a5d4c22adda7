// A Replica's backwards by grains: each grain of its part by itself, and stand-ins where other ranks have more of them.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/replica.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "arithmetic_check.hpp"
#include "averaging.hpp"
#include "grain_statistics.hpp"
#include "models/factors_scope.hpp"
#include "nn/random_layers.hpp"
#include "nn/weighed_backward.hpp"
#include "ranks/rank_place.hpp"
#include "stand_in.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// The batch with what it leaves to its default filled in.
Batch Replica::checked_grains(const Batch& batch) {
  const auto refuse = [this](const std::string& why) { throw Error(rank_.name() + ": DataParallel: " + why); };
  const std::string by_grains = "with a grain the results must not depend on the number of ranks, and ";
  const std::string& mixed = comm::RankPlace::of(rank_).run->mixed_processors;
  if (!mixed.empty() && !mixed_processors_are_allowed()) {
    refuse(by_grains + mixed + ", which round otherwise. Take processors of one kind (`lockstep devices` shows a " +
           "machine's), or leave out the grain. If other bits may come out, set LOCKSTEP_MIXED_PROCESSORS=1 for all");
  }
  if (!averaging_) refuse(by_grains + "a DataParallel with average = false adds nothing up; leave out one of the two");
  if (rank_.device().is_cpu() && at::get_num_threads() > 1) {
    refuse(by_grains + "here each rank has " + std::to_string(at::get_num_threads()) +
           " intra-op threads, whose sums depend on their number. Set RunOptions::threads_per_rank = 1 and take more "
           "ranks");
  }
  if (has_sync_batchnorm(*module_)) {
    refuse(by_grains +
           "a SyncBatchNorm normalises over what all ranks compute at once; take BatchNorm, which "
           "normalises over a grain");
  }
  if (const std::string random = first_random_layer(*module_); !random.empty()) {
    refuse(by_grains + random + " draws from LibTorch's generator, which all ranks share; take lockstep::Dropout");
  }
  if (!statistics_) statistics_ = std::make_unique<GrainStatistics>(*module_, rank_);
  Batch whole = batch;
  const auto rank = static_cast<size_t>(rank_.index());
  const int64_t grains = batch.grains();
  if (grains < 1)
    refuse("the batch has a grain and no samples: its global_size is " + std::to_string(batch.global_size));
  if (whole.runs.empty()) {
    if (batch.turns > 0 && averaging_->exchanges_in_forward()) {
      refuse(
          "the batch is a part by in_parts() of one without Batch::runs, so ranks may have unequal numbers of parts, "
          "and with Sharded::parameters all must have as many; take batches()");
    }
    whole.runs.push_back(0);
    for (int other = 0; other < rank_.world_size(); ++other) {
      whole.runs.push_back(part_of(grains, other, rank_.world_size()).end);
    }
  }
  if (whole.first < 0) refuse("the batch has a grain and no Batch::first, where its samples begin in the whole batch");
  const int64_t end = whole.first + batch.size();
  const bool fits = whole.runs.size() == static_cast<size_t>(rank_.world_size()) + 1 && whole.runs.back() == grains &&
                    whole.first % batch.grain == 0 && (end % batch.grain == 0 || end == batch.global_size) &&
                    whole.own_grains().begin >= whole.runs[rank] && whole.own_grains().end <= whole.runs[rank + 1];
  if (whole.runs.size() <= rank + 1 || (batch.size() > 0 && !fits)) {
    refuse("samples " + std::to_string(whole.first) + " to " + std::to_string(end) + " of a batch of " +
           std::to_string(batch.global_size) + " are not the grains of " + std::to_string(batch.grain) +
           " samples that this rank is to compute; take batches(…, rank), and cut its batches by in_parts()");
  }
  if (whole.first == whole.runs[rank] * batch.grain) statistics_->abandon();  // of a loss without a backward
  statistics_->set_sizes(batch.global_size, batch.grain);
  return whole;
}

at::Tensor Replica::mean_of_grain(const Batch& grain, SamplePlace place, const MeanOf& mean_of) {
  place.first = grain.first;
  place.size = grain.size();
  const SampleScope scope(place);
  at::Tensor mean;
  forward_grain(grain.own_grains().begin, [&] { mean = mean_of(grain); });
  mean = this->mean(std::move(mean), grain.size(), grain.global_size).local_mean_;
  check_targets(mean, grain.size(), grain.global_size);
  if (arithmetic_) arithmetic_->note_loss(grain.own_grains().begin, mean);
  return mean;
}

// How often this rank computes a stand-in, so that all ranks compute the layers equally often.
int64_t Replica::stand_ins_of(const Batch& part) const {
  return averaging_->exchanges_in_forward() ? part.most_grains() - part.own_grains().size() : 0;
}

// As mean_of_grain() does it, but for what is left behind: running statistics and all other buffers stay as they are.
at::Tensor Replica::mean_of_stand_in(const Batch& part, SamplePlace place, const MeanOf& mean_of) {
  const Batch stand_in = stand_in_for(part, rank_);
  place.first = 0;
  place.size = stand_in.size();
  place.again = true;
  const SampleScope scope(place);
  GrainStatistics dropped(*module_, rank_);
  dropped.set_sizes(part.global_size, part.grain);
  const auto buffers = module_->buffers();
  std::vector<at::Tensor> before;
  for (const auto& buffer : buffers) before.push_back(buffer.defined() ? buffer.detach().clone() : buffer);
  at::Tensor mean;
  dropped.forward(0, [&] { mean = mean_of(stand_in); });
  {
    const c10::NoGradGuard no_grad;
    // variable_data: autograd has noted the buffers, and must not see them change.
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (before[i].defined()) buffers[i].variable_data().copy_(before[i]);
    }
  }
  return this->mean(std::move(mean), stand_in.size(), stand_in.size()).local_mean_;
}

Loss Replica::loss_by_grains(const Batch& batch, const MeanOf& mean_of) {
  const Batch part = checked_grains(batch);
  const SamplePlace place = place_of(part);
  if (arithmetic_) arithmetic_->begin(part, place, mean_of);
  std::vector<GrainLoss> grains;
  at::Tensor sum = at::zeros({}, at::TensorOptions(rank_.device()).dtype(at::kDouble));
  for (int64_t number = part.own_grains().begin; number < part.own_grains().end; ++number) {
    const Batch grain = part.of_grain(number);
    grains.push_back({.number = number, .size = grain.size(), .mean = mean_of_grain(grain, place, mean_of)});
    sum.add_(grains.back().mean.detach(), static_cast<double>(grain.size()));
  }
  for (int64_t left = stand_ins_of(part); left > 0; --left)
    grains.push_back({.mean = mean_of_stand_in(part, place, mean_of)});
  Loss loss(shared_from_this(), sum / std::max<double>(1, static_cast<double>(batch.size())), 0, batch.size(),
            batch.global_size, batch.mark);
  loss.grains_ = std::move(grains);
  loss.runs_ = part.runs;
  return loss;
}

at::Tensor Replica::backward_by_grains(const Batch& batch, const MeanOf& mean_of) {
  const Batch part = checked_grains(batch);
  const SamplePlace place = place_of(part);
  if (arithmetic_) arithmetic_->begin(part, place, mean_of);
  at::Tensor sum = at::zeros({}, at::TensorOptions(rank_.device()).dtype(at::kDouble));
  const int64_t stand_ins = stand_ins_of(part);
  const auto compute = [&] {
    for (int64_t number = part.own_grains().begin; number < part.own_grains().end; ++number) {
      const Batch grain = part.of_grain(number);
      const at::Tensor mean = mean_of_grain(grain, place, mean_of);
      sum.add_(mean.detach(), static_cast<double>(grain.size()));
      backward_of({.number = number, .size = grain.size(), .mean = mean}, stand_ins);
    }
    for (int64_t left = stand_ins; left-- > 0;) backward_of({.mean = mean_of_stand_in(part, place, mean_of)}, left);
  };
  backward_of_grains(compute, part.runs, {.local = part.size(), .global = part.global_size, .mark = part.mark});
  return sum / std::max<double>(1, static_cast<double>(batch.size()));
}

void Replica::backward_in_grains(const Batch& batch, const std::function<void()>& compute) {
  const Batch part = checked_grains(batch);
  if (averaging_->exchanges_in_forward()) {
    throw Error(rank_.name() +
                ": DataParallel: with a grain and Sharded::parameters all ranks must compute the layers equally often, "
                "and a pipeline computes each rank's grains alone. Take Sharded::state or Sharded::gradients, or no "
                "pipeline");
  }
  if (arithmetic_) {
    throw Error(rank_.name() +
                ": DataParallel: check_arithmetic has a grain computed again by a rank that holds all layers, and here "
                "each rank holds some. Leave out check_arithmetic, or the pipeline");
  }
  backward_of_grains(compute, part.runs, {.local = part.size(), .global = part.global_size, .mark = part.mark});
}

void Replica::backward_of_grains(const std::function<void()>& compute, const std::vector<int64_t>& runs,
                                 const PartSizes& sizes) {
  averaging_->begin_grains({.runs = runs, .samples = sizes.global, .mark = sizes.mark});
  PartSizes by_grains = sizes;
  by_grains.by_grains = true;
  backward_of_parts(compute, by_grains);
  if (!sync_) return;
  statistics_->finish(runs);
  if (arithmetic_) arithmetic_->compare();
}

void Replica::forward_grain(int64_t number, const std::function<void()>& forward) {
  try {
    statistics_->forward(number, [&] { averaging_->loop_warnings().see_grain(forward, *module_, rank_); });
  } catch (...) {
    rethrow_failure();
    throw;
  }
}

void Replica::backward_grain(int64_t number, const std::function<void()>& backward) {
  backward_turn(number, 0, backward);
}

void Replica::backward_turn(int64_t number, int64_t stand_ins, const std::function<void()>& backward) {
  averaging_->open_grain(number, stand_ins);
  try {
    backward();
    averaging_->close_grain();
  } catch (...) {
    const std::string what = number == Averaging::kStandIn ? "a stand-in" : "grain " + std::to_string(number);
    averaging_->end(rank_.name() + ": DataParallel: an earlier backward of " + what +
                    " failed, so the step's gradients are incomplete. End the run there");
    throw;
  }
}

void Replica::backward_of_losses(const Loss& loss) {
  backward_of_grains(
      [&] {
        auto left = static_cast<int64_t>(
            std::count_if(loss.grains_.begin(), loss.grains_.end(), [](const auto& grain) { return grain.size == 0; }));
        for (const auto& grain : loss.grains_) {
          if (grain.size == 0) --left;
          backward_of(grain, left);
        }
      },
      loss.runs_, {.local = loss.local_size_, .global = loss.global_size_, .mark = loss.mark_});
}

// A stand-in's gradients, which are dropped, are of no samples, hence zero.
void Replica::backward_of(const GrainLoss& grain, int64_t stand_ins) {
  if (!grain.mean.requires_grad()) return refuse_loss_without_graph();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // it takes forward's types
  backward_turn(grain.size == 0 ? Averaging::kStandIn : grain.number, stand_ins, [&] {
    const WeighedBackward weighed(grain.mean, static_cast<double>(grain.size), *module_);
    // A unit of divided parameters is reduced as soon as it has its gradients, so there they do not wait.
    const FactorsScope scope(grain.mean, [&](const auto& parameter, const auto& factors) {
      return !averaging_->exchanges_in_forward() && !weighed.weighs_gradients() &&
             averaging_->take_factors(parameter, factors);
    });
    grain.mean.backward(weighed.seed());
  });
}

}  // namespace lockstep
