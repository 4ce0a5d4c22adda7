// A SimulatedJob's launchers, as `lockstep launch` does it with real processes (cli/launch.cpp,
// cli/child_processes.cpp): one for all of its processes, or in an elastic job one on each machine.
#include <lockstep/base/error.hpp>

#include "c_library.hpp"
#include "comm/meeting/agent_launcher.hpp"
#include "comm/meeting/first_launcher.hpp"
#include "comm/meeting/meeting.hpp"
#include "simulated_job.hpp"

#include <algorithm>
#include <optional>

namespace lockstep::simulation {
namespace {

using namespace std::chrono_literals;

constexpr auto kUntilFirstBeat = 10s;
constexpr int kSuccessors = 4;
constexpr auto kPatience = 20s;                  // of agents with the first launcher
constexpr Time kAgentsLook = 20 * kMillisecond;  // as often as launchers of several machines look
// What `lockstep launch` gives processes after the first failure, and how often it looks.
constexpr Time kUntilKilled = 5 * kSecond, kLook = 100 * kMillisecond;

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

void SimulatedJob::add_launcher(int node, Process& process, std::function<void(size_t number)> body) {
  course_.launchers.push_back(
      {.node = node, .processes = plan_.places(), .start = scheduler_.now(), .process = &process});
  scheduler_.start(process, [this, number = course_.launchers.size() - 1, body = std::move(body)] {
    Launched& launched = course_.launchers[number];
    try {
      body(number);
    } catch (const Error& error) {
      say(launched, error.what());
      launched.code = 1;
    }
    launched.end = scheduler_.now();
    launched.over = true;
  });
}

void SimulatedJob::be_first(Launched& launched) {
  std::optional<comm::Rendezvous> rendezvous;
  if (plan_.has_agents()) rendezvous.emplace(environment_of_node(0), comm::WaitLimit{kPatience});
  const auto store = rendezvous ? rendezvous->connect_to_all() : comm::host_store("127.0.0.1", kPort, {}).store;
  Machine machine(scheduler_, plan_.has_agents() ? kAgentsLook : kLook, hooks_of(launched));
  constexpr std::chrono::milliseconds silence(kAgentSilence / kMillisecond);
  comm::FirstLauncher launcher(store,
                               {.name = launch_of(0).job,
                                .processes = plan_.processes,
                                .restarts = kSuccessors,
                                .machines = {plan_.nodes, plan_.most_nodes()},
                                .limits = {kUntilFirstBeat, plan_.seed % 4 == 0 ? 1s : 0s, {silence, silence}}},
                               machine, [&](int member, int place, const comm::ProcessEnd& end) {
                                 comm::announce_end(store, launch_of(member, place), end);
                               });
  launcher.begin();
  launched.code = machine.wait({[&](int member, const comm::ProcessEnd& end, bool killed, int) {
                                  return launcher.note_end(member, end, killed);
                                },
                                [&](int ending) { return launcher.look(ending); }});
}

void SimulatedJob::be_agent(Launched& launched) {
  comm::Rendezvous rendezvous(environment_of_node(launched.node), comm::WaitLimit{kPatience});
  Machine machine(scheduler_, kAgentsLook, hooks_of(launched));
  comm::AgentLauncher launcher(rendezvous.connect_to_all(),
                               {.name = launch_of(0).job,
                                .node = launched.node,
                                .arrival = {launched.processes, plan_.most_nodes()},
                                .store_place = "127.0.0.1:" + std::to_string(kPort),
                                .patience = kPatience},
                               machine);
  launched.code = machine.wait({[&](int member, const comm::ProcessEnd& end, bool killed, int code) {
                                  return launcher.note_end(member, end, killed, code);
                                },
                                [&](int ending) { return launcher.look(ending); }});
  launcher.leave(launched.code);
}

// As if all machines were one, so that they meet over loopback.
comm::LaunchEnvironment SimulatedJob::environment_of_node(int node) const {
  return {.launcher = "the simulation",
          .rank = node,
          .world_size = plan_.most_nodes(),
          .local_rank = node,
          .local_world_size = plan_.most_nodes(),
          .address = "127.0.0.1",
          .port = kPort,
          .job = "nodes",
          .node_address_name = "the first machine"};
}

Machine::Hooks SimulatedJob::hooks_of(Launched& launched) {
  return {.start = [this, &launched](int member, int place) -> Process& { return start(launched, member, place); },
          .failure_of = [this](int member) { return course_.outcomes[member].text; },
          .kill = [this](int member) { kill(member); },
          .say = [this, &launched](const std::string& text) { say(launched, text); },
          .ends = &ends_};
}

Process& SimulatedJob::start(const Launched& launched, int member, int place) {
  const auto wrong = [&](const std::string& what) {
    network_.wrongs.push_back("process " + std::to_string(member) + " was started, and " + what);
  };
  if (member < count() && processes_[member] != nullptr) wrong("there is one of that number already");
  for (int other = 0; other < count(); ++other) {
    const Outcome& outcome = course_.outcomes[other];
    if (processes_[other] == nullptr || !processes_[other]->lives() || outcome.launcher != launched.process) continue;
    if (outcome.place == place) wrong("process " + std::to_string(other) + " still runs in its place");
  }
  if (place / plan_.places() != launched.node) wrong("its place is on another machine");
  add_process(member, place);
  Outcome& outcome = course_.outcomes[member];
  outcome.node = launched.node;
  outcome.place = place;
  outcome.start = scheduler_.now();
  outcome.launcher = launched.process;
  start(member);
  return *processes_[member];
}

void SimulatedJob::say(Launched& launched, const std::string& text) {
  scheduler_.note("says: " + text);
  launched.said.push_back(text);
  if (launched.node != 0) return;
  for (int node = 1; node < plan_.most_nodes(); ++node) {
    if (text.starts_with("node " + std::to_string(node) + " is gone"))
      course_.lost_nodes.emplace_back(node, scheduler_.now());
  }
}

// ---- Other machines.

Time SimulatedJob::time_after(double part) const {
  return static_cast<Time>(part * static_cast<double>(reference_ ? reference_->time : 3 * kSecond));
}

void SimulatedJob::add_agents() {
  for (int node = 1; node < plan_.most_nodes(); ++node) {
    Time when = static_cast<Time>(scheduler_.draw(100 * kMillisecond));
    if (node >= plan_.nodes) when = time_after(plan_.grows);
    for (size_t i = 0; i < plan_.strikes.size(); ++i) {
      if (plan_.strikes[i].fault != Fault::late_agent || plan_.strikes[i].victim != node) continue;
      when = std::max(when, plan_.strikes[i].length);
      scheduler_.at(when, happens(i));
    }
    scheduler_.at(when, [this, node] { add_agent(node); });
  }
  for (size_t i = 0; i < plan_.strikes.size(); ++i) {
    const Strike& strike = plan_.strikes[i];
    if (!strike.is_of_node()) continue;
    scheduler_.at(time_after(strike.part), [this, i, &strike] {
      Process* const agent = agent_of(strike.victim);
      const bool is_extra = strike.fault == Fault::twin_agent || strike.fault == Fault::other_agent;
      if (is_extra && launcher_->lives()) {
        note(i);
        add_agent(strike.victim, true, strike.fault == Fault::other_agent ? 1 : 0);
      } else if (!is_extra && agent != nullptr) {
        scheduler_.at_point(*agent, agent->points + strike.points, [this, i, agent] { strike_agent(i, *agent); });
      }
    });
  }
}

void SimulatedJob::add_agent(int node, bool is_extra, int more_processes) {
  if (!launcher_->lives()) return;
  Process& process = scheduler_.add_process("launcher of node " + std::to_string(node));
  for (size_t i = 0; i < plan_.strikes.size(); ++i) {
    const Strike& strike = plan_.strikes[i];
    if (strike.fault != Fault::slow_agent || strike.victim != node) continue;
    process.slowness = strike.length;
    note(i);
  }
  add_launcher(node, process, [this](size_t number) { be_agent(course_.launchers[number]); });
  course_.launchers.back().processes += more_processes;
  course_.launchers.back().is_extra = is_extra;
}

Process* SimulatedJob::agent_of(int node) const {
  for (const auto& process : scheduler_.processes()) {
    if (process->lives() && process->name == "launcher of node " + std::to_string(node)) return process.get();
  }
  return nullptr;
}

void SimulatedJob::strike_agent(size_t i, Process& agent) {
  const Strike& strike = plan_.strikes[i];
  const Time until = scheduler_.now() + strike.length;
  const auto of_node = [&](const std::function<void(Process&)>& act) {
    act(agent);
    for (int process = 0; process < count(); ++process) {
      if (processes_[process] != nullptr && course_.outcomes[process].launcher == &agent) act(*processes_[process]);
    }
  };
  switch (strike.fault) {
    case Fault::kill_agent:
    case Fault::restart:
      scheduler_.kill(agent);
      if (strike.fault == Fault::restart) scheduler_.at(until, [this, node = strike.victim] { add_agent(node); });
      break;
    case Fault::stop_agent:
      scheduler_.stop(agent, strike.length);
      break;
    case Fault::stop_node:
      of_node([&](Process& process) { scheduler_.stop(process, strike.length); });
      break;
    case Fault::cut_agent:
      network_.cut(agent, *launcher_, until);
      break;
    case Fault::cut_node:
      of_node([&](Process& process) { cut_from_other_machines(process, agent, until); });
      break;
    default:
      return;
  }
  note(i);
}

void SimulatedJob::cut_from_other_machines(Process& process, const Process& agent, Time until) {
  network_.cut(process, *launcher_, until);
  for (int other = 0; other < count(); ++other) {
    if (processes_[other] != nullptr && course_.outcomes[other].launcher != &agent)
      network_.cut(process, *processes_[other], until);
  }
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
  const Outcome& outcome = course_.outcomes[process];
  const bool is_lost = std::any_of(course_.lost_nodes.begin(), course_.lost_nodes.end(),
                                   [&](const auto& lost) { return lost.first == outcome.node; });
  // It may still look for a store that is gone, for longer than its launcher waits.
  const bool looks_for_store = plan_.has_agents() && !launcher_->lives() && outcome.ranks[0].weights.empty();
  if (!stood && !is_lost && !looks_for_store) killed_by_launcher_.push_back(process);
  scheduler_.kill(one);
}

void SimulatedJob::hear_of_end(Process& process) {
  network_.tell_of_death(process);
  c_library::unlock_files(process);
  scheduler_.wake_all(&ends_);
  if (process.killed && &process != launcher_) {  // a machine's launcher takes its processes along
    for (int other = 0; other < count(); ++other) {
      if (processes_[other] != nullptr && course_.outcomes[other].launcher == &process)
        scheduler_.kill(*processes_[other]);
    }
  }
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
