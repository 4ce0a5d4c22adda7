#include "replica_watch.hpp"

#include "flat_options.hpp"

#include <utility>

namespace lockstep {

ReplicaWatch::ReplicaWatch(const TrainOptions& options, const SplitModel& net, const Update& update,
                           StepTraffic& traffic)
    : every_(options.check_replicas),
      has_grains_(options.batch.grain),
      round_(flat(options).local.sync_every),
      net_(net),
      update_(update),
      traffic_(traffic) {}

void ReplicaWatch::before_update() {
  if (!compares_in(number_)) return;
  check_memory();
  if (round_ == 0) compare();
}

void ReplicaWatch::after_update() {
  if (compares_after_round()) compare();
  noted_.clear();
  alone_.forget();
  if (!compares_in(number_ + 1)) return;
  if (round_ == 0 && net_.mesh().data().world_size() == 2) noted_ = hashes_of(update_.replica());
  if (update_.has_some_alone()) alone_.note(update_.alone());
}

// Tells whether a multiple of N is in the round that has just ended.
bool ReplicaWatch::compares_after_round() const {
  if (every_ <= 0 || round_ == 0 || number_ % round_ != 0) return false;
  return number_ / every_ > (number_ - round_) / every_;
}

// Nothing changes a replica between two epochs, so what was noted holds for the next one's first step. Hashes are noted
// after an epoch's last update if the next step is checked, as when every step is.
void ReplicaWatch::end_epoch() {
  if (every_ == 0) return;
  check_memory();
  compare();
}

void ReplicaWatch::check_memory() {
  if (alone_.has_notes()) traffic_.leave_out([&] { alone_.check(update_.alone(), traffic_.rank()); });
}

void ReplicaWatch::compare() {
  traffic_.leave_out([&] {
    io::NamedTensors replica = update_.replica();
    if (has_grains_) {  // the statistics come last, since they change from step to step and are not noted
      for (auto& statistic : running_statistics_of(update_.part()->module())) replica.push_back(std::move(statistic));
    }
    const auto compare_parts = [&] { compare_replicas(replica, net_.mesh().data(), noted_); };
    const bool has_parts = net_.mesh().data().world_size() < traffic_.rank().world_size();
    has_parts ? compare_in_groups(compare_parts, traffic_.rank()) : compare_parts();
  });
}

}  // namespace lockstep
