#include "plan.hpp"

#include "base/scramble.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace lockstep::simulation {
namespace {

using Faults = std::vector<Fault>;

// Each as often as it stands here.
const Faults kOfAny{Fault::kill, Fault::kill,      Fault::kill, Fault::kill, Fault::kill, Fault::kill,  Fault::stop,
                    Fault::stop, Fault::kill_host, Fault::slow, Fault::late, Fault::cut,  Fault::throws};
const Faults kOfDataParallel{Fault::kill,       Fault::kill,       Fault::kill,      Fault::kill,      Fault::kill,
                             Fault::kill,       Fault::stop,       Fault::stop,      Fault::kill_host, Fault::slow,
                             Fault::late,       Fault::cut,        Fault::throws,    Fault::throws,    Fault::leaves,
                             Fault::differs,    Fault::unanswered, Fault::full_disk, Fault::power,     Fault::power,
                             Fault::lost_fsync, Fault::lost_fsync};

const Faults kOfElastic{Fault::kill, Fault::kill,   Fault::kill,      Fault::kill,      Fault::kill,      Fault::kill,
                        Fault::kill, Fault::stop,   Fault::stop,      Fault::kill_host, Fault::slow,      Fault::late,
                        Fault::cut,  Fault::throws, Fault::full_disk, Fault::power,     Fault::lost_fsync};

// Processes, and ranks of each.
constexpr std::pair<int, int> kWorlds[] = {{2, 1}, {3, 1}, {4, 1}, {2, 2}};

class Draws {
 public:
  explicit Draws(uint64_t seed, uint64_t stream = 1) : state_(mix({seed, stream})) {}
  uint64_t below(uint64_t count) {
    state_ += kGolden;
    return scramble(state_) % count;
  }
  // A part of a process's way. Half of the faults come at its beginning or end, where most is decided.
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

Strike strike_of(Draws& draws, const Plan& plan) {
  const Faults& faults = plan.is_elastic()                        ? kOfElastic
                         : plan.program == Program::data_parallel ? kOfDataParallel
                                                                  : kOfAny;
  Strike strike;
  strike.fault = faults[draws.below(faults.size())];
  if (strike.is_by_rank() && plan.has(strike.fault))
    strike.fault = Fault::kill;  // two ranks that do the same may agree
  const bool may_be_successor = plan.is_elastic() && !plan.strikes.empty();
  strike.victim = draws.between(0, plan.processes - 1 + (may_be_successor ? 2 : 0));
  strike.other = (strike.victim + draws.between(1, plan.processes - 1)) % plan.processes;
  strike.part = draws.when();
  strike.step = draws.between(0, kSteps - 1);
  strike.call = draws.between(0, 60);
  strike.calls = draws.between(1, 20);
  const bool is_long = draws.below(2) == 0;
  strike.length = is_long ? draws.between(12'000, 40'000) * kMillisecond : draws.between(10, 600) * kMillisecond;
  if (strike.fault == Fault::slow) strike.length = draws.between(1, 10) * kMillisecond;
  if (strike.fault == Fault::late) strike.length = draws.between(10, 400) * kMillisecond;
  return strike;
}

std::string text_of(const Strike& strike) {
  const std::string process = "process " + std::to_string(strike.victim);
  const std::string when = " after " + std::to_string(static_cast<int>(strike.part * 100)) + " % of its way";
  const std::string in_step = " in step " + std::to_string(strike.step);
  const std::string call = "call " + std::to_string(strike.call);
  switch (strike.fault) {
    case Fault::kill:
      return process + " is killed" + when;
    case Fault::kill_host:
      return "whoever keeps the store is killed" + when;
    case Fault::stop:
      return process + " stands still for " + seconds_text(strike.length) + when;
    case Fault::slow:
      return process + " loses up to " + seconds_text(strike.length) + " at a time";
    case Fault::late:
      return "messages are late by up to " + seconds_text(strike.length);
    case Fault::cut:
      return process + " is cut from process " + std::to_string(strike.other) + " for " + seconds_text(strike.length) +
             when;
    case Fault::throws:
      return "the first rank of " + process + " throws" + in_step;
    case Fault::leaves:
      return "the first rank of " + process + " returns" + in_step;
    case Fault::differs:
      return "the first rank of " + process + " makes another call" + in_step;
    case Fault::unanswered:
      return "the first rank of " + process + " makes a call more than the others";
    case Fault::full_disk:
      return "the disk is full from " + call + " on";
    case Fault::power:
      return "the power fails in " + call + " of the disk";
    case Fault::lost_fsync:
      return "the disk loses the first fsync from " + call + " on, and the power fails " +
             std::to_string(strike.calls) + " calls later";
  }
  return "";
}

}  // namespace

Plan plan_of(uint64_t seed) {
  Draws draws(seed);
  Plan plan;
  plan.seed = seed;
  const uint64_t program = draws.below(8);
  plan.program = program < 2 ? Program::elastic : Program::data_parallel;
  std::tie(plan.processes, plan.ranks_per_process) = kWorlds[draws.below(std::size(kWorlds))];
  plan.launcher = draws.below(2) == 0;
  plan.checkpoints = draws.below(2) == 0;
  if (plan.is_elastic()) {
    std::tie(plan.processes, plan.ranks_per_process) = std::pair(draws.between(2, 4), 1);
    plan.launcher = plan.checkpoints = true;
  }
  const uint64_t count = draws.below(12);
  const int strikes = count == 0 ? 0 : count < (plan.is_elastic() ? 7 : 9) ? 1 : 2;
  for (int i = 0; i < strikes; ++i) plan.strikes.push_back(strike_of(draws, plan));
  plan.checkpoints |= plan.has_disk_fault();
  return plan;
}

std::vector<Plan> undisturbed() {
  std::vector<Plan> plans;
  for (const auto& [processes, ranks] : kWorlds) {
    plans.push_back({.processes = processes, .ranks_per_process = ranks, .checkpoints = true});
  }
  for (const int processes : {2, 3, 4})
    plans.push_back({.program = Program::elastic, .processes = processes, .checkpoints = true});
  return plans;
}

bool Strike::is_harmless() const {
  switch (fault) {
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

bool Strike::is_by_rank() const {
  return fault == Fault::throws || fault == Fault::leaves || fault == Fault::differs || fault == Fault::unanswered;
}

bool Plan::has(Fault fault) const {
  return std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) { return strike.fault == fault; });
}

bool Plan::has_disk_fault() const {
  return has(Fault::full_disk) || has(Fault::power) || has(Fault::lost_fsync);
}

bool Plan::is_of(const std::string& kind) const {
  if (kind == "elastic") return is_elastic();
  if (kind == "plain") return program == Program::data_parallel;
  if (kind == "the keeper stops") {
    return is_elastic() && std::any_of(strikes.begin(), strikes.end(), [](const Strike& strike) {
             return strike.fault == Fault::stop && strike.victim == 0 && !strike.is_harmless();
           });
  }
  if (kind == "lost fsync") return has(Fault::lost_fsync);
  if (kind == "two faults") return strikes.size() > 1;
  throw std::invalid_argument("no run is of the kind " + kind);
}

std::string Plan::text() const {
  std::string text = std::to_string(processes) + " processes of " + std::to_string(ranks_per_process) +
                     (ranks_per_process == 1 ? " rank, " : " ranks, ");
  if (is_elastic()) text += "elastic, ";
  text += launcher ? "a launcher keeps the store" : "process 0 keeps the store";
  if (strikes.empty()) text += "; no fault";
  for (const auto& strike : strikes) text += "; " + text_of(strike);
  return text;
}

}  // namespace lockstep::simulation
