#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sharded_optimizer.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "divided_parameters.hpp"
#include "optim/made_optimizer.hpp"
#include "parameter_units.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/trained_parameters.hpp"
#include "sharded_parameters.hpp"
#include "sharded_reducer.hpp"
#include "sharded_state.hpp"

#include <map>
#include <string>
#include <utility>

namespace lockstep {
namespace {

void check_sharded(const ShardedOptions& options, const Rank& rank) {
  const auto refuse = [&](const std::string& why) { throw Error(rank.name() + ": ShardedOptimizer: " + why); };
  if (comm::RankPlace::of(rank).run->elastic != nullptr) {
    refuse(
        "with RunOptions::elastic a slice of the optimizer is lost with its process. Take an optimizer of whole "
        "parameters; or leave `elastic` out, let lockstep launch start all processes again when one is lost "
        "(`max_restarts`), and go on from your newest checkpoint");
  }
  if (options.stage < 1 || options.stage > 3) {
    refuse("stage is " + std::to_string(options.stage) +
           "; it must be 1 (optimizer state), 2 (and gradients) or 3 (and parameters)");
  }
  if (options.bucket_bytes < 1) {
    refuse("bucket_bytes is " + std::to_string(options.bucket_bytes) + "; it must be at least 1");
  }
  if (options.stage < 3 && !options.units.empty()) {
    refuse("units are of stage 3, and stage is " + std::to_string(options.stage) + "; leave them out, or take stage 3");
  }
}

std::vector<ShardedBucket> buckets_of(torch::nn::Module& module, const TrainedParameters& parameters, const Rank& rank,
                                      const ShardedOptions& options) {
  check_sharded(options, rank);
  if (options.stage > 1 && has_sync_batchnorm(module)) {
    throw Error(rank.name() +
                ": ShardedOptimizer: the net has a SyncBatchNorm, in whose backward ranks wait for each other, as " +
                "stage " + std::to_string(options.stage) +
                " does in its own way; together they could wait in a circle. Use stage 1");
  }
  if (parameters.all().empty()) {
    throw Error(rank.name() + ": ShardedOptimizer: there is no parameter that needs a gradient");
  }
  if (options.stage == 3) return shard_in_units(parameters.all(), options, rank);
  return shard_parameters(parameters.all(), rank, options.bucket_bytes);
}

std::shared_ptr<DividedParameters> divided_of(const std::vector<ShardedBucket>& buckets, const Rank& rank,
                                              const ShardedOptions& options) {
  if (options.stage < 3) return nullptr;
  return std::make_shared<DividedParameters>(buckets, rank, options.overlap);
}

// The groups, with this rank's pieces in the place of the parameters.
ShardedOptimizer::Groups groups_of_pieces(const ShardedOptimizer::Groups& groups,
                                          const std::vector<ShardedBucket>& buckets, const Rank& rank) {
  std::map<const c10::TensorImpl*, const ShardedBucket::Place*> places;
  io::NamedTensors parameters;
  for (const auto& bucket : buckets) {
    for (const auto& place : bucket.places) {
      places.emplace(place.parameter.unsafeGetTensorImpl(), &place);
      parameters.emplace_back(place.name, place.parameter);
    }
  }
  check_groups(groups, parameters, rank.name() + ": ShardedOptimizer");
  ShardedOptimizer::Groups of_pieces;
  for (const auto& group : groups) {
    std::vector<at::Tensor> pieces;
    for (const auto& parameter : group.params()) {
      if (!parameter.requires_grad()) continue;
      const ShardedBucket::Piece& piece = places.at(parameter.unsafeGetTensorImpl())->piece;
      if (piece.size > 0) pieces.push_back(piece.values);
    }
    of_pieces.emplace_back(std::move(pieces));
    if (group.has_options()) of_pieces.back().set_options(group.options().clone());
  }
  return of_pieces;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(std::shared_ptr<Replica> replica, const Factory& make, const ShardedOptions& options)
    : ShardedOptimizer(std::move(replica), options,
                       [&](const std::vector<ShardedBucket>& buckets) { return make(pieces_of(buckets)); }) {}

ShardedOptimizer::ShardedOptimizer(std::shared_ptr<Replica> replica, const Groups& groups, const GroupsFactory& make,
                                   const ShardedOptions& options)
    : ShardedOptimizer(replica, options, [&](const std::vector<ShardedBucket>& buckets) {
        return make(groups_of_pieces(groups, buckets, replica->rank()));
      }) {}

ShardedOptimizer::ShardedOptimizer(std::shared_ptr<Replica> replica, const ShardedOptions& options,
                                   const OfBuckets& make)
    : replica_(std::move(replica)),
      rank_(replica_->rank()),
      parameters_(std::make_unique<TrainedParameters>(replica_->module())),
      buckets_(buckets_of(replica_->module(), *parameters_, rank_, options)),
      divided_(divided_of(buckets_, rank_, options)),
      reducer_(std::make_shared<ShardedReducer>(buckets_, rank_, options, divided_)),
      // One over net->parameters() would step with gradients of which this rank has only its share.
      optimizer_(
          checked_optimizer(make(buckets_), pieces_of(buckets_), rank_.name() + ": ShardedOptimizer", "slices")) {
  replica_->set_averaging(reducer_);
}

ShardedOptimizer::~ShardedOptimizer() {
  reducer_->take_filler_away();
  reducer_->end(rank_.name() +
                ": ShardedOptimizer: the one that averaged this DataParallel's gradients is gone; keep " +
                "it as long as you train, or make another one");
  if (divided_) {
    divided_->end(rank_.name() +
                  ": the ShardedOptimizer of stage 3 is gone, and with it the parameters that it divided among the "
                  "ranks; save them before that, while a whole() lives, and load them into a new net");
  }
}

void ShardedOptimizer::zero_grad() {
  reducer_->zero_grad();
}

void ShardedOptimizer::step() {
  const c10::NoGradGuard no_grad;
  parameters_->check(rank_, "ShardedOptimizer", "would be neither averaged nor used");
  reducer_->use();
  if (divided_) divided_->put_away();
  optimizer_->step();
  if (divided_) return divided_->bring_back();
  std::vector<std::pair<at::Tensor, at::Tensor>> values;
  for (const auto& bucket : buckets_) values.emplace_back(bucket.values, bucket.slice);
  gather_slices(values, rank_);
}

ShardedOptimizer::Whole::Whole(ShardedOptimizer& optimizer) : divided_(optimizer.divided_) {
  if (divided_) divided_->hold();
}

ShardedOptimizer::Whole::~Whole() {
  if (divided_) divided_->release();
}

std::vector<at::Tensor> ShardedOptimizer::gradients() const {
  return reducer_->gradients();
}

std::vector<WatchedTensor> slices_of_rank(const ShardedOptimizer& optimizer) {
  auto slices = watched_slices_of_state(*optimizer.optimizer_, optimizer.buckets_);
  if (!optimizer.divided_) return slices;
  for (auto& piece : watched_pieces(optimizer.buckets_)) slices.push_back(std::move(piece));
  return slices;
}

ShardedOptimizer::State ShardedOptimizer::state() {
  return whole_state(*optimizer_, buckets_, rank_);
}

void ShardedOptimizer::load_state(const State& state) {
  load_slices_of_state(*optimizer_, buckets_, state);
}

}  // namespace lockstep
