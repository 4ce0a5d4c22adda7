#include "plan.hpp"

#include "base/scramble.hpp"

#include <array>
#include <iterator>
#include <tuple>

namespace lockstep::simulation {
namespace {

// Each as often as it stands here.
constexpr std::array kFaults{Fault::kill,    Fault::kill,       Fault::kill,   Fault::kill,   Fault::kill,
                             Fault::kill,    Fault::kill_host,  Fault::stop,   Fault::stop,   Fault::slow,
                             Fault::late,    Fault::cut,        Fault::throws, Fault::throws, Fault::leaves,
                             Fault::differs, Fault::unanswered, Fault::none,   Fault::none,   Fault::full_disk,
                             Fault::power,   Fault::power};

class Draws {
 public:
  explicit Draws(uint64_t seed) : state_(mix({seed, 1})) {}
  uint64_t below(uint64_t count) {
    state_ += kGolden;
    return scramble(state_) % count;
  }
  // A part of a process's way. Half of the faults come at its beginning or at its end, where most is decided.
  double when() {
    const uint64_t kind = below(4);
    if (kind == 0) return static_cast<double>(below(100)) / 1000;
    if (kind == 1) return static_cast<double>(900 + below(150)) / 1000;
    return static_cast<double>(below(1'050)) / 1000;
  }
  int between(int first, int last) { return first + static_cast<int>(below(last - first + 1)); }

 private:
  uint64_t state_;
};

std::string seconds_text(Time time) {
  return std::to_string(time / kMillisecond) + " ms";
}

}  // namespace

Plan plan_of(uint64_t seed) {
  Draws draws(seed);
  Plan plan;
  plan.seed = seed;
  std::tie(plan.processes, plan.ranks_per_process) = kWorlds[draws.below(std::size(kWorlds))];
  plan.launcher = draws.below(2) == 0;
  plan.fault = kFaults[draws.below(kFaults.size())];
  plan.victim = draws.between(0, plan.processes - 1);
  plan.other = (plan.victim + draws.between(1, plan.processes - 1)) % plan.processes;
  plan.part = draws.when();
  plan.step = draws.between(0, kSteps - 1);
  plan.call = draws.between(0, 60);
  const bool is_long = draws.below(2) == 0;
  plan.length = is_long ? draws.between(12'000, 40'000) * kMillisecond : draws.between(10, 1'000) * kMillisecond;
  if (plan.fault == Fault::slow) plan.length = draws.between(1, 10) * kMillisecond;
  if (plan.fault == Fault::late) plan.length = draws.between(10, 400) * kMillisecond;
  return plan;
}

Plan undisturbed(int processes, int ranks_per_process) {
  return {.processes = processes, .ranks_per_process = ranks_per_process};
}

bool Plan::is_harmless() const {
  switch (fault) {
    case Fault::none:
    case Fault::slow:
    case Fault::late:
      return true;
    case Fault::stop:
    case Fault::cut:
      return length <= kSecond;
    default:
      return false;
  }
}

std::string Plan::text() const {
  std::string text = std::to_string(processes) + " processes of " + std::to_string(ranks_per_process) +
                     (ranks_per_process == 1 ? " rank, " : " ranks, ") +
                     (launcher ? "a launcher keeps the store; " : "process 0 keeps the store; ");
  const std::string process = "process " + std::to_string(victim);
  const std::string when = " after " + std::to_string(static_cast<int>(part * 100)) + " % of its way";
  switch (fault) {
    case Fault::none:
      return text + "no fault";
    case Fault::kill:
      return text + process + " is killed" + when;
    case Fault::kill_host:
      return text + "whoever keeps the store is killed" + when;
    case Fault::stop:
      return text + process + " stands still for " + seconds_text(length) + when;
    case Fault::slow:
      return text + process + " loses up to " + seconds_text(length) + " at a time";
    case Fault::late:
      return text + "messages are late by up to " + seconds_text(length);
    case Fault::cut:
      return text + process + " is cut from process " + std::to_string(other) + " for " + seconds_text(length) + when;
    case Fault::throws:
      return text + "the first rank of " + process + " throws in step " + std::to_string(step);
    case Fault::leaves:
      return text + "the first rank of " + process + " returns in step " + std::to_string(step);
    case Fault::differs:
      return text + "the first rank of " + process + " makes another call in step " + std::to_string(step);
    case Fault::unanswered:
      return text + "the first rank of " + process + " makes a call more than the others";
    case Fault::full_disk:
      return text + "the disk is full from call " + std::to_string(call) + " on";
    case Fault::power:
      return text + "the power fails in call " + std::to_string(call) + " of the disk";
  }
  return text;
}

}  // namespace lockstep::simulation
