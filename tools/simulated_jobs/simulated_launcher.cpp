// A SimulatedJob's launcher, as `lockstep launch` does it with real processes (cli/launch.cpp, cli/launch_elastic.cpp,
// cli/child_processes.cpp).
#include "c_library.hpp"
#include "children.hpp"
#include "comm/meeting/meeting.hpp"
#include "simulated_job.hpp"
#include "survive/elastic_launcher.hpp"
#include "trainer/checkpoint_folder.hpp"

#include <algorithm>

namespace lockstep::simulation {
namespace {

using namespace std::chrono_literals;

constexpr auto kUntilFirstBeat = 10s;
constexpr int kSuccessors = 4;

}  // namespace

void SimulatedJob::launch() {
  const auto kept = comm::host_store("127.0.0.1", kPort, {});
  for (int left = plan_.processes; left > 0;) {
    while (ends_.empty()) {
      scheduler_.wait(&ends_, to_kill_);
      if (scheduler_.now() >= to_kill_) kill_the_rest();
    }
    const auto [process, how] = ends_.front();
    ends_.pop_front();
    --left;
    const bool failed = !how.empty();
    comm::announce_end(kept.store, launch_of(process), {failed, false, failed ? how : "it ended"});
    if (failed) note_failure();
  }
}

void SimulatedJob::launch_elastic() {
  const auto store = comm::host_store("127.0.0.1", kPort, {}).store;
  Children children(scheduler_, {.start = [this](int member, int place) -> Process& { return start(member, place); },
                                 .failure_of = [this](int member) { return course_.outcomes[member].text; },
                                 .kill = [this](int member) { kill(member); },
                                 .say = [this](const std::string& text) { say(text); },
                                 .ends = &ends_});
  comm::ElasticLauncher launcher(store,
                                 {.name = launch_of(0).job,
                                  .processes = plan_.processes,
                                  .restarts = kSuccessors,
                                  .limits = {kUntilFirstBeat, plan_.seed % 4 == 0 ? 1s : 0s}},
                                 children, [&](int member, int place, const comm::ProcessEnd& end) {
                                   comm::announce_end(store, launch_of(member, place), end);
                                 });
  launcher.begin();
  course_.launcher_code =
      children.wait(launcher, [](const std::string& folder) { return newest_checkpoint(folder).string(); });
}

Process& SimulatedJob::start(int member, int place) {
  const auto wrong = [&](const std::string& what) {
    network_.wrongs.push_back("process " + std::to_string(member) + " was started, and " + what);
  };
  if (member < count() && processes_[member] != nullptr) wrong("there is one of that number already");
  for (int other = 0; other < count(); ++other) {
    if (processes_[other] == nullptr || !processes_[other]->lives()) continue;
    if (course_.outcomes[other].place == place) wrong("process " + std::to_string(other) + " still runs in its place");
  }
  if (place >= plan_.processes) wrong("there is no such place");
  add_process(member, place);
  Outcome& outcome = course_.outcomes[member];
  outcome.place = place;
  outcome.was_started = true;
  start(member);
  return *processes_[member];
}

void SimulatedJob::say(const std::string& text) {
  scheduler_.note("says: " + text);
  course_.said.push_back(text);
}

// ---- Ends.

void SimulatedJob::note_failure() {
  if (to_kill_ == kNever) to_kill_ = scheduler_.now() + kUntilKilled;
}

void SimulatedJob::kill_the_rest() {
  for (int process = 0; process < count(); ++process) kill(process);
}

// One that stood still need not end by itself.
void SimulatedJob::kill(int process) {
  Process& one = *processes_[process];
  if (!one.lives()) return;
  const bool stood = std::any_of(plan_.strikes.begin(), plan_.strikes.end(), [&](const Strike& strike) {
    return strike.fault == Fault::stop && strike.victim == process && !strike.is_harmless();
  });
  if (!stood) killed_by_launcher_.push_back(process);
  scheduler_.kill(one);
}

void SimulatedJob::hear_of_end(Process& process) {
  network_.tell_of_death(process);
  c_library::unlock_files(process);
  scheduler_.wake_all(&ends_);
  const auto found = std::find(processes_.begin(), processes_.end(), &process);
  if (found == processes_.end()) return;
  const auto number = static_cast<int>(found - processes_.begin());
  Outcome& outcome = course_.outcomes[number];
  if (!process.killed) {
    outcome.threads_left = scheduler_.threads_of(process) - 1;
    outcome.connections_left = process.connections;
    outcome.groups_left = process.groups;
  }
  const std::string how = process.killed         ? "it was ended by signal 9 (Killed)"
                          : outcome.text.empty() ? ""
                                                 : "it ended with exit code 1";
  ends_.emplace_back(number, how);
}

}  // namespace lockstep::simulation
