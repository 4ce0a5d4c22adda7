#include "backwards.hpp"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include "data/latest_batch.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/shared_generator.hpp"
#include "replica.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace lockstep {
namespace {

std::unordered_set<const c10::TensorImpl*> addresses_of(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const c10::TensorImpl*> addresses{at::Tensor().unsafeGetTensorImpl()};  // an undefined one
  for (const auto& tensor : tensors) addresses.insert(tensor.unsafeGetTensorImpl());
  return addresses;
}

// Gives the parameters that a module has itself. parameters() makes copies, and names them.
struct Opened : torch::nn::Module {
  static const auto& parameters_of(const torch::nn::Module& module) { return module.*(&Opened::parameters_); }
};

// Without a grain the gradients' rounding follows the number of ranks.
void warn_if_elastic(const Rank& rank) {
  const auto& place = comm::RankPlace::of(rank);
  if (place.run->succession == nullptr || rank.index() != 0) return;
  place.warn(
      "DataParallel: this run is elastic, and the batch has no grain: once a process is gone, the others go on to "
      "other bits. Set BatchOptions::grain, such as 32");
}

// A loss of a batch from batches() has the batch's mark, also where the user took its grain away. Otherwise this
// thread's last batch counts, if it was cut for these ranks and has the loss's size.
void take_latest_batch(const Rank& rank, PartSizes& sizes) {
  if (sizes.by_grains || sizes.mark != 0) return;
  const auto latest = latest_batch();
  if (!latest) return;
  if (sizes.global > 0 && (sizes.global != latest->global || sizes.local > latest->local)) return;
  if (latest->partners == rank.world_size()) sizes.mark = latest->mark;
  if (latest->grain == 0) return;
  throw Error(
      rank.name() + ": DataParallel: a backward without grains, while the batch of " + std::to_string(latest->global) +
      " samples that batches() gave has grains of " + std::to_string(latest->grain) +
      ". Its bits would depend on the number of ranks. Take net.loss(batch, function), which calls the function "
      "for each grain; or leave out BatchOptions::grain");
}

}  // namespace

Backwards::Backwards(Replica& replica) : replica_(replica), parameters_(addresses_of(replica.module().parameters())) {}

bool Backwards::has_new_parameter(const torch::nn::Module& module) const {
  for (const auto& item : Opened::parameters_of(module)) {
    if (!parameters_.contains(item.value().unsafeGetTensorImpl())) return true;
  }
  const auto children = module.children();
  return std::any_of(children.begin(), children.end(), [this](const auto& child) { return has_new_parameter(*child); });
}

// Nobody would average a new parameter's gradients, and it was not made equal on all ranks.
void Backwards::check_that_no_parameter_is_new() const {
  if (!has_new_parameter(replica_.module())) return;
  for (const auto& item : replica_.module().named_parameters()) {
    if (parameters_.contains(item.value().unsafeGetTensorImpl())) continue;
    throw Error(replica_.rank().name() + ": DataParallel: " + item.key() +
                " was registered after this DataParallel was made, so that it is not equal on all ranks, nor are its "
                "gradients averaged. Register all layers first, then make the DataParallel, and then the optimizer");
  }
}

void Backwards::check(PartSizes& sizes) {
  Rank& rank = replica_.rank();
  rank.backend();  // throws once the run is over
  warn_of_shared_seed(rank);
  take_latest_batch(rank, sizes);
  if (replica_.grains().check() && !sizes.by_grains) {
    throw Error(rank.name() +
                ": DataParallel: a grain_check computes grains again, and this batch has none. Set "
                "BatchOptions::grain, such as 32, and take net.loss(batch, function); or leave out the check");
  }
  // A single rank gives new parameters right gradients, but by grains. The first backwards refuse these all the same.
  const bool may_refuse = rank.world_size() > 1 || sizes.by_grains || backwards_alone_++ < 3;
  if (replica_.averaging() && may_refuse) check_that_no_parameter_is_new();
  replica_.check_optimizer();
}

void Backwards::run(const std::function<void()>& compute, const PartSizes& sizes, const std::vector<int64_t>& runs) {
  const HiddenGradients::Shown gradients(replica_.hidden_gradients());
  TORCH_INTERNAL_ASSERT(sizes.by_grains == !runs.empty());
  if (runs.empty()) return compute_all(compute, sizes);
  replica_.averaging()->begin_grains({.runs = runs, .samples = sizes.global, .mark = sizes.mark});
  compute_all(compute, sizes);
  if (!syncs()) return;
  replica_.grains().finish(runs);
  if (GrainCheck* const check = replica_.grains().check()) check->compare();
}

void Backwards::compute_all(const std::function<void()>& compute, PartSizes sizes) {
  RECORD_USER_SCOPE("lockstep::backward");
  check(sizes);
  waiting_ += sizes.local;
  if (!syncs() && sizes.global == 0) waiting_is_known_ = false;
  by_grains_ = sizes.by_grains;
  const auto computes = [&] {
    try {
      compute();
    } catch (...) {
      replica_.rethrow_failure();
      throw;
    }
  };
  if (syncs() && !partial_) return average(computes, sizes);
  replica_.places().computed();
  if (!syncs()) return computes();
  replica_.averaging()->average_during(computes, {.mark = sizes.mark, .partial = true});
}

void Backwards::average(const std::function<void()>& computes, PartSizes sizes) {
  SamplePlaces& places = replica_.places();
  if (places.steps_done() == 0 && !sizes.by_grains) warn_if_elastic(replica_.rank());
  comm::RankPlace::of(replica_.rank()).world().stepped(places.steps_done());
  places.set_steps_done(places.steps_done() + 1);
  GradientBuckets* const averaging = replica_.averaging();
  if (!averaging) return computes();
  replica_.warnings().see_backward(sizes.mark);
  sizes.accumulated = std::exchange(waiting_, 0);
  if (!std::exchange(waiting_is_known_, true)) sizes.global = 0;
  const auto all = [&] {
    computes();
    if (computed_) computed_();
  };
  averaging->average_during(all, sizes);
  if (averaged_) averaged_();
}

void Backwards::watch(std::function<void()> computed, std::function<void()> averaged) {
  if (computed_) throw Error("DataParallel: this net's backwards are watched already; one Balance is enough");
  if (!replica_.averaging() || replica_.divides_gradients()) {
    throw Error(
        "DataParallel: a Balance needs average = true, and Sharded::state or nothing: otherwise backwards wait for no "
        "other rank, or for others before all of this rank's own part is computed");
  }
  computed_ = std::move(computed);
  averaged_ = std::move(averaged);
}

void Backwards::count_no_sync(int change) {
  no_syncs_ += change;
  if (replica_.averaging()) replica_.averaging()->listen(syncs());
}

// ---- Guards.

NoSync::NoSync(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {
  replica_->backwards().count_no_sync(1);
}

NoSync::~NoSync() {
  if (replica_) replica_->backwards().count_no_sync(-1);
}

PartOfStep::PartOfStep(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {
  replica_->backwards().partial_ = true;
}

PartOfStep::~PartOfStep() {
  replica_->backwards().partial_ = false;
}

Whole::Whole(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {
  if (replica_->sharded()) replica_->sharded()->hold();
}

Whole::~Whole() {
  if (replica_->sharded()) replica_->sharded()->release();
}

}  // namespace lockstep
