#include "replica_watch.hpp"

#include "data_parallel/replica_check.hpp"

namespace lockstep {

ReplicaWatch::ReplicaWatch(const TrainOptions& options, const SplitModel& net, const Update& update,
                           StepTraffic& traffic)
    : every_(options.check_replicas),
      round_(options.exchange.sync_every),
      net_(net),
      update_(update),
      traffic_(traffic) {}

void ReplicaWatch::before_update() {
  if (round_ == 0 && compares_in(number_)) compare();
}

void ReplicaWatch::after_update() {
  if (round_ > 0 && compares_in(number_) && number_ % round_ == 0) compare();
  noted_.clear();
  if (round_ == 0 && compares_in(number_ + 1) && net_.mesh().data().world_size() == 2)
    noted_ = hashes_of(update_.replica());
}

void ReplicaWatch::end_epoch() {
  if (every_ == -1) compare();
  noted_.clear();
}

void ReplicaWatch::compare() {
  traffic_.leave_out([&] { compare_replicas(update_.replica(), net_.mesh().data(), noted_); });
}

}  // namespace lockstep
