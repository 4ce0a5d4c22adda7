#include "replica_grains.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "base/classic.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "data/batch_tensors.hpp"
#include "nn/random_layers.hpp"
#include "ranks/rank_place.hpp"
#include "replica.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

namespace lockstep {
namespace {

// Gives the first `count` rows; if there are fewer, the first one again in place of the missing ones.
at::Tensor rows_of(const at::Tensor& tensor, int64_t count) {
  if (tensor.size(0) >= count) return tensor.slice(0, 0, count).clone();
  return at::cat(std::vector<at::Tensor>(static_cast<size_t>(count), tensor.slice(0, 0, 1)));
}

bool is_like(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) return one.defined() == other.defined();
  return one.scalar_type() == other.scalar_type() && one.device() == other.device() && one.dim() == other.dim() &&
         one.sizes().slice(1) == other.sizes().slice(1);
}

std::string kind_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "is not there";
  return classic_text("is ", tensor.scalar_type(), " of sizes ", tensor.sizes(), " on ", tensor.device());
}

// A loop may change a batch and forget the example. Otherwise only the rank without samples would fail, within a layer.
void check_example(const Batch& part, const Rank& rank) {
  const auto check = [&](const std::string& name, const at::Tensor& example, const at::Tensor& rows) {
    if (is_like(example, rows)) return;
    throw Error(rank.name() + ": DataParallel: this rank has no samples of the batch, and computes the example that " +
                "Batch::like gives; but batch.like." + name + " " + kind_text(example) + ", and batch." + name + " " +
                kind_text(rows) + ". Do to batch.like." + name + " what you did to batch." + name);
  };
  const auto at_name = [](const Dataset::Tensors& tensors, const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? at::Tensor() : found->second;
  };
  check("x", part.like.x, part.x);
  check("y", part.like.y, part.y);
  for (const auto& [name, rows] : part.more) check("more[\"" + name + "\"]", at_name(part.like.more, name), rows);
}

// Gives two samples of the part, or one if the batch's grains have one: of one alone a BatchNorm may have no variance.
// A part without samples gives its example (Batch::like) twice.
Batch stand_in_for(const Batch& part, const Rank& rank) {
  Batch stand_in = part;
  if (part.size() == 0) {
    if (!part.like.x.defined()) {
      throw Error(rank.name() +
                  ": DataParallel: this rank has no samples of the batch, and with Sharded::parameters all ranks "
                  "compute the layers. It needs an example for that: take batches(), or give one sample in "
                  "Batch::like");
    }
    check_example(part, rank);
    stand_in.x = part.like.x;
    stand_in.y = part.like.y;
    stand_in.more = part.like.more;
  }
  const int64_t count = std::min<int64_t>(part.grain, 2);
  stand_in = with_each_tensor(std::move(stand_in), [&](const at::Tensor& tensor) { return rows_of(tensor, count); });
  stand_in.first = 0;
  return stand_in;
}

}  // namespace

ReplicaGrains::ReplicaGrains(Replica& replica, std::shared_ptr<GrainCheck> check)
    : replica_(replica), check_(std::move(check)) {
  if (check_) check_->watch(replica_.module(), replica_.rank());
}

void ReplicaGrains::refuse_what_depends_on_ranks() const {
  const Rank& rank = replica_.rank();
  const auto refuse = [&](const std::string& why) {
    throw Error(rank.name() + ": DataParallel: with a grain the results must not depend on the number of ranks, and " +
                why);
  };
  const std::string& mixed = comm::RankPlace::of(rank).run->mixed_processors;
  if (!mixed.empty() && !comm::mixed_processors_in(std::getenv)) {
    refuse(mixed +
           ", which round otherwise. Take processors of one kind (`lockstep devices` shows a machine's), or leave out "
           "the grain. If other bits may come out, set LOCKSTEP_MIXED_PROCESSORS=1 for all");
  }
  if (!replica_.averaging()) refuse("a DataParallel with average = false adds nothing up; leave out one of the two");
  if (rank.device().is_cpu() && at::get_num_threads() > 1) {
    refuse("here each rank has " + std::to_string(at::get_num_threads()) +
           " intra-op threads, whose sums depend on their number. Set RunOptions::threads_per_rank = 1 and take more "
           "ranks");
  }
  if (has_sync_batchnorm(replica_.module())) {
    refuse(
        "a SyncBatchNorm normalises over what all ranks compute at once; take BatchNorm, which normalises over a "
        "grain");
  }
  if (const std::string random = first_random_layer(replica_.module()); !random.empty())
    refuse(random + " draws from LibTorch's generator, which all ranks share; take lockstep::Dropout");
}

Batch ReplicaGrains::checked(const Batch& batch) {
  refuse_what_depends_on_ranks();
  Rank& rank = replica_.rank();
  if (!statistics_) statistics_ = std::make_unique<GrainStatistics>(replica_.module(), rank);
  Batch whole = batch;
  const int64_t grains = batch.grains();
  const auto refuse = [&](const std::string& why) { throw Error(rank.name() + ": DataParallel: the batch " + why); };
  if (grains < 1) refuse("has a grain and no samples: its global_size is " + std::to_string(batch.global_size));
  if (whole.runs.empty()) {
    if (batch.turns > 0 && replica_.divides_parameters()) {
      refuse(
          "is a part by in_parts() of one without Batch::runs, so ranks may have unequal numbers of parts, and with "
          "Sharded::parameters all must have as many; take batches()");
    }
    whole.runs.push_back(0);
    for (int other = 0; other < rank.world_size(); ++other)
      whole.runs.push_back(part_of(grains, other, rank.world_size()).end);
  }
  if (whole.first < 0) refuse("has a grain and no Batch::first, where its samples begin in the whole batch");
  check_place(whole, batch);
  const auto index = static_cast<size_t>(rank.index());
  // A loss without a backward may have left notes.
  if (whole.first == whole.runs[index] * batch.grain) statistics_->abandon();
  statistics_->set_sizes(batch.global_size, batch.grain);
  return whole;
}

void ReplicaGrains::check_place(const Batch& whole, const Batch& batch) const {
  const Rank& rank = replica_.rank();
  const auto index = static_cast<size_t>(rank.index());
  const int64_t end = whole.first + batch.size();
  const bool fits = whole.runs.size() == static_cast<size_t>(rank.world_size()) + 1 &&
                    whole.runs.back() == batch.grains() && whole.first % batch.grain == 0 &&
                    (end % batch.grain == 0 || end == batch.global_size) &&
                    whole.own_grains().begin >= whole.runs[index] && whole.own_grains().end <= whole.runs[index + 1];
  if (whole.runs.size() > index + 1 && (batch.size() == 0 || fits)) return;
  throw Error(rank.name() + ": DataParallel: samples " + std::to_string(whole.first) + " to " + std::to_string(end) +
              " of a batch of " + std::to_string(batch.global_size) + " are not the grains of " +
              std::to_string(batch.grain) +
              " samples that this rank is to compute; take batches(…, rank), and cut its batches by in_parts()");
}

at::Tensor ReplicaGrains::mean_of_grain(const Batch& grain, SampleScope::Place place, const MeanOf& mean_of) {
  place.first = grain.first;
  place.size = grain.size();
  const SampleScope scope(place);
  at::Tensor mean;
  forward(grain.own_grains().begin, [&] { mean = mean_of(grain); });
  if (check_) check_->note(grain.own_grains().begin, {}, mean);
  return mean;
}

int64_t ReplicaGrains::stand_ins_of(const Batch& part) const {
  return replica_.divides_parameters() ? part.most_grains() - part.own_grains().size() : 0;
}

at::Tensor ReplicaGrains::mean_of_stand_in(const Batch& part, SampleScope::Place place, const MeanOf& mean_of) {
  const Batch stand_in = stand_in_for(part, replica_.rank());
  place.first = 0;
  place.size = stand_in.size();
  place.again = true;
  const SampleScope scope(place);
  GrainStatistics dropped(replica_.module(), replica_.rank());
  dropped.set_sizes(part.global_size, part.grain);
  const auto buffers = replica_.module().buffers();
  std::vector<at::Tensor> before;
  for (const auto& buffer : buffers) before.push_back(buffer.defined() ? buffer.detach().clone() : buffer);
  at::Tensor mean;
  dropped.forward(0, [&] { mean = mean_of(stand_in); });
  const c10::NoGradGuard no_grad;
  // variable_data: autograd has noted the buffers, and must not see them change.
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (before[i].defined()) buffers[i].variable_data().copy_(before[i]);
  }
  return mean;
}

void ReplicaGrains::forward(int64_t number, const std::function<void()>& forward) {
  try {
    statistics_->forward(number, [&] { replica_.warnings().see_grain(forward); });
  } catch (...) {
    replica_.rethrow_failure();
    throw;
  }
}

void ReplicaGrains::backward(int64_t number, const std::function<void()>& backward, int64_t stand_ins) {
  GradientBuckets& averaging = *replica_.averaging();
  averaging.open_grain(number, stand_ins);
  try {
    backward();
    averaging.close_grain();
  } catch (...) {
    const std::string what = number == kStandIn ? "a stand-in" : "grain " + std::to_string(number);
    averaging.end(replica_.rank().name() + ": DataParallel: an earlier backward of " + what +
                  " failed, so the step's gradients are incomplete. End the run there");
    throw;
  }
}

}  // namespace lockstep
