// A RankPlace has the ranks that a Rank makes its calls with, and the world that can make groups of these ranks while
// the run lasts.
#pragma once

#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "base/libtorch_log.hpp"
#include "comm/members.hpp"
#include "comm/texts.hpp"
#include "comm/world.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace lockstep {
class Succession;
}

namespace lockstep::comm {

// RankRandom has a rank's random numbers, in all groups of the rank.
struct RankRandom {
  uint64_t seed = 0;  // the run's seed
  at::Generator generator;
};

// A RunningWorld is a run's world, as the ranks know it. Ranks may be kept longer than the world lasts.
class RunningWorld {
 public:
  RunningWorld(World& world, std::chrono::milliseconds timeout, std::string mixed_processors,
               std::function<void(const std::string&)> on_warning)
      : devices(world.devices()),
        ranks_here(world.ranks_here()),
        process(world.process()),
        timeout(timeout),
        mixed_processors(std::move(mixed_processors)),
        world_(&world),
        on_warning_(std::move(on_warning)) {}

  World* world() const { return world_; }  // gives null if the run is over
  void end() { world_ = nullptr; }

  // Warns as RunOptions::on_warning says.
  void warn(const std::string& text) {
    const std::lock_guard lock(warning_);
    if (on_warning_) return on_warning_(text);
    warn_as_libtorch("lockstep: " + text);
  }

  const Devices devices;
  const Range ranks_here;
  const int process;
  const std::chrono::milliseconds timeout;  // the timeout of a wait for other ranks
  // Names two ranks on two kinds of processor (devices/processor_kind.hpp); empty: none are known. Such ranks round
  // differently: results depend on who computes what, and copies of one network drift apart.
  const std::string mixed_processors;

  Succession* succession = nullptr;         // makes the run elastic (succession.hpp); null: it is not
  std::atomic<bool> told_of_graph = false;  // a rank was warned of a tensor with a graph

 private:
  std::atomic<World*> world_;
  std::mutex warning_;
  const std::function<void(const std::string&)> on_warning_;
};

class RankPlace {
 public:
  RankPlace(std::shared_ptr<RunningWorld> run, int world_rank, Members members, RankRandom random)
      : run(std::move(run)), world_rank(world_rank), members(std::move(members)), random(std::move(random)) {}

  static Rank rank(const std::shared_ptr<RunningWorld>& run, int world_rank, Members members, RankRandom random) {
    auto place = std::make_shared<RankPlace>(run, world_rank, std::move(members), std::move(random));
    auto backend = place->world().backend(world_rank, place->members);
    return Rank(std::move(place), std::move(backend));
  }

  static const RankPlace& of(const Rank& rank) { return *rank.place_; }

  // Gives this rank as a group of its own. No other rank needs to call it.
  static Rank alone(const Rank& rank) {
    const auto& place = of(rank);
    const std::string name = place.members.name + "/alone." + std::to_string(place.world_rank);
    const Rank made = RankPlace::rank(place.run, place.world_rank, {name, {place.world_rank}}, place.random);
    return rank.wrap_ ? made.wrapped(rank.wrap_) : made;
  }

  World& world() const {  // throws Error once the run is over
    if (World* const world = run->world()) return *world;
    throw Error(text_of_ended_run(name_of(world_rank, run->devices)));
  }

  void warn(const std::string& text) const { run->warn(name_of(world_rank, run->devices) + ": " + text); }

  const std::shared_ptr<RunningWorld> run;
  const int world_rank;
  const Members members;
  const RankRandom random;
  int groups = 0;                          // the number of groups that were made so far; equal on all members
  mutable bool averages = false;           // a DataParallel averages a backward over these ranks right now
  mutable int64_t gathered_backwards = 0;  // the number of gather_from_group's backwards so far, where they compare
};

}  // namespace lockstep::comm
