#include <lockstep/base/error.hpp>
#include <lockstep/survive/elastic.hpp>

#include "elastic_job.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/succession.hpp"

#include <atomic>

namespace lockstep {
namespace {

// Serves a loop of the user's own, which says itself when others may join.
class ElasticLoop : public Succession {
 public:
  explicit ElasticLoop(const RunOptions& options) : job_(options.stop, options.silence) {}

  bool enter() override {
    has_begun_ = regroups_ = false;
    return job_.enter();
  }
  void leave() override { job_.leave(); }
  bool goes_on() override { return regroups_; }

  bool regroups(Rank& rank) {
    const bool regroups = rank.any(job_.newer().stop_requested());  // now all ranks are here
    if (regroups) regroups_ = true;
    if (rank.index() == 0 && !has_begun_.exchange(true)) job_.note_beginning();
    return regroups;
  }

 private:
  ElasticJob job_;
  std::atomic<bool> has_begun_ = false;  // all ranks of the generation have the same state
  std::atomic<bool> regroups_ = false;   // they have agreed that others join
};

}  // namespace

std::shared_ptr<Succession> elastic(const Devices& devices, const RunOptions& options) {
  if (!ElasticJob::is_asked_for()) return nullptr;
  if (!devices[0].is_cpu()) {
    throw Error(
        "run: `elastic` is for CPU ranks: on GPUs an update may be under way when a process is lost. Take fit(), which "
        "waits for it, or the devices of CPUs");
  }
  return std::make_shared<ElasticLoop>(options);
}

bool regroups(Rank& rank) {
  const comm::RankPlace& place = comm::RankPlace::of(rank);
  place.world();  // throws once the run is over, and with it the succession
  if (!place.members.name.empty()) {
    throw Error(rank.name() +
                ": regroups() is for all ranks of the run at the same time, so call it on the Rank that run() "
                "gives, and not on a group's");
  }
  auto* const loop = dynamic_cast<ElasticLoop*>(place.run->succession);
  return loop != nullptr && loop->regroups(rank);
}

}  // namespace lockstep
