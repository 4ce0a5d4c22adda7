#include "simulation.hpp"

#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>
#include <nlohmann/json.hpp>

#include "comm/failure.hpp"
#include "comm/meeting/agent_launcher.hpp"
#include "comm/meeting/first_launcher.hpp"
#include "comm/meeting/job_store.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/meeting.hpp"
#include "disk.hpp"
#include "job_of_process.hpp"
#include "machine.hpp"
#include "network.hpp"
#include "outcome.hpp"
#include "ranks/elastic_job.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "training.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>

namespace lockstep::simulation {
namespace {

using namespace std::chrono_literals;

constexpr int kPort = 29'500;
constexpr Time kLimit = 120 * kSecond;
constexpr int kBetweenCheckpoints = 5, kKept = 2;
constexpr auto kFixedSilence = 3s;  // of every second run; the others' follows their processes' gaps
constexpr auto kUntilFirstBeat = 10s;
constexpr int kSuccessors = 4;
constexpr auto kPatience = 20s;                  // of agents with the first launcher
constexpr Time kPace = 100 * kMillisecond;       // of steps on several machines, so that these have time to come again
constexpr Time kAgentsLook = 20 * kMillisecond;  // as often as launchers of several machines look
// What `lockstep launch` gives processes after the first failure, and how often it looks.
constexpr Time kUntilKilled = 5 * kSecond, kLook = 100 * kMillisecond;

class Simulation {
 public:
  Simulation(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log)
      : plan_(plan),
        reference_(reference),
        folder_(folder),
        scheduler_(plan.seed, with_log, kLimit),
        network_(scheduler_),
        disk_(scheduler_.draw(2) == 0),
        consistency_(scheduler_.draw(2) == 0 ? Consistency::asynchronous : Consistency::bounded) {
    course_.plan = plan;
    course_.times.resize(plan.strikes.size(), kNever);
    course_.host = plan.launcher ? "the launcher"
                   : plan.ranks_per_process == 1
                       ? "the process of rank 0 (cpu)"
                       : "the process of ranks 0 to " + std::to_string(plan.ranks_per_process - 1);
  }

  Report run() {
    plant_disk_faults();
    scheduler_.on_death = [this](Process& process) { hear_of_end(process); };
    if (plan_.launcher) launcher_ = &scheduler_.add_process("launcher");
    for (int process = 0; !plan_.is_elastic() && process < plan_.processes; ++process) add_process(process, process);
    if (plan_.is_elastic()) add_launcher(0, *launcher_, [this](size_t number) { be_first(course_.launchers[number]); });
    if (plan_.has_agents()) add_agents();
    if (!plan_.is_elastic()) {
      if (launcher_ != nullptr) scheduler_.start(*launcher_, [this] { launch(); });
      for (int process = 0; process < plan_.processes; ++process) start(process);
    }
    course_.left = scheduler_.run();
    if (plan_.checkpoints) read_checkpoint();
    if (plan_.is_elastic()) read_generations();
    return report();
  }

 private:
  std::chrono::milliseconds silence() const { return plan_.seed % 2 == 0 ? kFixedSilence : 0s; }
  int count() const { return static_cast<int>(processes_.size()); }  // of processes, with successors

  std::map<std::string, std::string> environment_of(int process, int place) const {
    const std::string rank = std::to_string(place), count = std::to_string(std::max(plan_.processes, place + 1));
    std::map<std::string, std::string> all{{"RANK", rank},
                                           {"WORLD_SIZE", count},
                                           {"LOCAL_RANK", std::to_string(place % plan_.places())},
                                           {"LOCAL_WORLD_SIZE", std::to_string(plan_.places())},
                                           {"MASTER_ADDR", "127.0.0.1"},
                                           {"MASTER_PORT", std::to_string(kPort)},
                                           {"TORCHELASTIC_USE_AGENT_STORE", plan_.launcher ? "True" : "False"}};
    if (plan_.is_server()) all["LOCKSTEP_KEEP_GOING"] = "1";
    if (!plan_.is_elastic()) return all;
    all["LOCKSTEP_ELASTIC_MEMBER"] = std::to_string(process);
    all["LOCKSTEP_ELASTIC_MIN"] = "1";
    return all;
  }

  comm::LaunchEnvironment launch_of(int process, int place) const {
    const auto environment = environment_of(process, place);
    return *comm::read_launch_environment([&](const char* name) -> const char* {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  }
  comm::LaunchEnvironment launch_of(int process) const { return launch_of(process, process); }

  Outcome& outcome_of(int process) {
    while (static_cast<int>(course_.outcomes.size()) <= process) {
      course_.outcomes.emplace_back().ranks.resize(plan_.ranks_per_process);
    }
    return course_.outcomes[process];
  }

  void add_process(int process, int place) {
    Process& added = scheduler_.add_process("process " + std::to_string(process));
    added.environment = environment_of(process, place);
    processes_.resize(std::max(processes_.size(), static_cast<size_t>(process) + 1));
    outcome_of(process);
    processes_[process] = &added;
    for (size_t i = 0; i < plan_.strikes.size(); ++i) {
      if (plan_.strikes[i].victim == process && !plan_.strikes[i].is_of_node()) plant(i, added);
    }
  }

  void start(int process) {
    scheduler_.start(*processes_[process], [this, process] { be_process(process); });
  }

  // ---- The faults.

  void note(size_t strike) { course_.times[strike] = std::min(course_.times[strike], scheduler_.now()); }

  std::function<void()> happens(
      size_t strike, std::function<void()> fault = [] {}) {
    return [this, strike, fault = std::move(fault)] {
      note(strike);
      fault();
    };
  }

  void plant(size_t i, Process& victim) {
    const Strike& strike = plan_.strikes[i];
    const auto point = static_cast<int64_t>(strike.part * static_cast<double>(reference_ ? reference_->points : 1'000));
    const auto at_point = [&](std::function<void()> fault) {
      scheduler_.at_point(victim, point, happens(i, std::move(fault)));
    };
    switch (strike.fault) {
      case Fault::kill:
        return at_point([this, &victim] { scheduler_.kill(victim); });
      case Fault::kill_host:  // a launcher has few points of its own, so it dies at a process's
        return at_point([this] { scheduler_.kill(launcher_ != nullptr ? *launcher_ : *processes_[0]); });
      case Fault::stop:
        return at_point([this, &victim, &strike] { scheduler_.stop(victim, strike.length); });
      case Fault::cut:
        return at_point([this, &victim, &strike] {
          if (strike.other < count() && processes_[strike.other] != nullptr)
            network_.cut(victim, *processes_[strike.other], scheduler_.now() + strike.length);
        });
      case Fault::slow:
        victim.slowness = strike.length;
        return note(i);
      case Fault::late:
        network_.lateness = strike.length;
        return note(i);
      default:  // a rank's, or the disk's
        return;
    }
  }

  void plant_disk_faults() {
    for (size_t i = 0; i < plan_.strikes.size(); ++i) {
      const Strike& strike = plan_.strikes[i];
      const auto goes_out = [this] {
        for (const auto& process : scheduler_.processes()) scheduler_.kill(*process);
      };
      if (strike.fault == Fault::full_disk) disk_.fills = {strike.call, happens(i)};
      if (strike.fault == Fault::power) disk_.power = {strike.call, happens(i, goes_out)};
      if (strike.fault == Fault::lost_fsync) {
        disk_.loses = {strike.call, happens(i)};
        disk_.power = {strike.call + strike.calls, happens(i, goes_out)};
      }
    }
  }

  // ---- What the processes do.

  void be_process(int process) {
    Outcome& outcome = course_.outcomes[process];
    RunOptions options;
    options.timeout = 20s;
    options.rendezvous_timeout = 20s;
    options.silence = silence();
    try {
      plan_.is_elastic() ? run_generations(process, options) : run_ranks(process, options);
    } catch (const Error& error) {
      outcome.text = error.what();
    }
    outcome.end = scheduler_.now();
    outcome.over = true;
    scheduler_.note("run() has ended" + (outcome.text.empty() ? "" : ": " + outcome.text));
    jobs().erase(processes_[process]);
  }

  void run_ranks(int process, const RunOptions& options) {
    const Devices devices(plan_.ranks(), c10::Device(c10::kCPU));
    const auto body = [&](Rank& rank) {
      const Listener listener{[&](int step) { return goes_on(process, rank, step); },
                              [&](int step, const Parameters& parameters) {
                                if (plan_.checkpoints && rank.index() == 0 && (step + 1) % kBetweenCheckpoints == 0)
                                  save(step + 1, parameters);
                              }};
      Steps& steps = course_.outcomes[process].ranks[rank.index_in_process()];
      if (plan_.is_server()) return train_at_servers(rank, data_, plan_.servers, consistency_, steps, listener);
      train(rank, data_, steps, listener);
      for (size_t i = 0; i < plan_.strikes.size(); ++i) {
        if (plan_.strikes[i].fault != Fault::unanswered || !is_victim(plan_.strikes[i], process, rank)) continue;
        note(i);
        std::vector<at::Tensor> numbers{at::zeros({3})};
        rank.backend().allreduce(numbers, c10d::AllreduceOptions());
      }
    };
    lockstep::run(devices, body, options);
  }

  void run_generations(int process, const RunOptions& options) {
    ElasticJob job({}, silence(), {});
    Progress progress{.zero_stage = plan_.zero_stage};
    const auto body = [&](Rank& rank) {
      const Listener listener{[&](int step) { return goes_on(process, rank, step); }, [](int, const Parameters&) {}};
      train_elastic(rank, data_, job, progress, course_.outcomes[process].ranks[0], listener);
    };
    while (!progress.is_last && job.enter()) {
      try {
        lockstep::run({c10::Device(c10::kCPU)}, body, options);
      } catch (const comm::ProcessDied&) {
        progress.is_last = false;
        job.leave();
      }
    }
  }

  bool is_victim(const Strike& strike, int process, const Rank& rank) const {
    return strike.victim == process && rank.index_in_process() == 0;
  }

  bool goes_on(int process, Rank& rank, int step) {
    bool goes_on = true;
    if (plan_.has_agents()) scheduler_.sleep(kPace);
    for (size_t i = 0; i < plan_.strikes.size(); ++i) {
      const Strike& strike = plan_.strikes[i];
      if (strike.step != step || !strike.is_by_rank() || !is_victim(strike, process, rank)) continue;
      if (strike.fault == Fault::unanswered) continue;
      note(i);
      if (strike.fault == Fault::throws) throw std::runtime_error("thrown by the test");
      if (strike.fault == Fault::differs) rank.barrier();
      if (strike.fault == Fault::leaves) goes_on = false;
    }
    return goes_on;
  }

  void save(int step, const Parameters& parameters) {
    RunState state{.epochs = 0, .steps = step, .seconds = 1, .history = {}, .config = "{}", .tensors = {}};
    put_under("model", parameters, state.tensors);
    const bool had_lost = disk_.has_lost();
    CheckpointFolder(folder_ / "checkpoints", kKept, disk_).write(state);
    if (had_lost == disk_.has_lost()) course_.saved = step;
  }

  // As the next run would.
  void read_checkpoint() {
    const bool out = std::any_of(plan_.strikes.begin(), plan_.strikes.end(), [](const Strike& strike) {
      return strike.fault == Fault::power || strike.fault == Fault::lost_fsync;
    });
    if (out && !scheduler_.processes()[0]->lives()) disk_.crash();
    try {
      const auto file = checkpoint_to_go_on(folder_ / "checkpoints", {});
      if (file.empty()) return;
      const RunState state = read_run_state(file);
      course_.found = static_cast<int>(state.steps);
      Parameters parameters;
      for (const std::string name : {"w", "b"}) {
        for (const auto& found : tensors_under("model", state.tensors)) {
          if (found.first == name) parameters.push_back(found);
        }
      }
      course_.found_weights = digest_of(parameters);
    } catch (const Error& error) {
      course_.unreadable = error.what();
    }
  }

  // ---- The launcher, as `lockstep launch` does it with real processes (cli/launch.cpp, cli/child_processes.cpp).

  void launch() {
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
      const auto end = comm::announce_end(kept.store, launch_of(process), {failed, false, failed ? how : "it ended"});
      if (failed && !end.is_loss) note_failure();
      if (plan_.is_server() && only_lost_run(kept.store)) note_failure();
    }
  }

  void add_launcher(int node, Process& process, std::function<void(size_t number)> body) {
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

  void be_first(Launched& launched) {
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
                                   return comm::announce_end(store, launch_of(member, place), end).is_loss;
                                 });
    launcher.begin();
    launched.code = machine.wait({[&](int member, const comm::ProcessEnd& end, bool killed, int) {
                                    return launcher.note_end(member, end, killed);
                                  },
                                  [&](int ending) { return launcher.look(ending); }});
  }

  void be_agent(Launched& launched) {
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
  comm::LaunchEnvironment environment_of_node(int node) const {
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

  Machine::Hooks hooks_of(Launched& launched) {
    return {.start = [this, &launched](int member, int place) -> Process& { return start(launched, member, place); },
            .failure_of = [this](int member) { return course_.outcomes[member].text; },
            .kill = [this](int member) { kill(member); },
            .say = [this, &launched](const std::string& text) { say(launched, text); },
            .ends = &ends_};
  }

  Process& start(const Launched& launched, int member, int place) {
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

  void say(Launched& launched, const std::string& text) {
    scheduler_.note("says: " + text);
    launched.said.push_back(text);
    if (launched.node != 0) return;
    for (int node = 1; node < plan_.most_nodes(); ++node) {
      if (text.starts_with("node " + std::to_string(node) + " is gone"))
        course_.lost_nodes.emplace_back(node, scheduler_.now());
    }
  }

  // What the store has kept of the generations.
  void read_generations() {
    const auto& host = network_.hosts[kPort];
    if (!host) return;
    const std::string begun = comm::job_prefix(launch_of(0).job) + comm::kGenerations;
    for (const auto& text : host->generations) {
      const auto object = nlohmann::json::parse(text);
      const std::string key = begun + "/begun/" + std::to_string(object.at("number").get<int>());
      course_.generations.push_back({object.at("members"), host->values.contains(key)});
      for (const int member : course_.generations.back().members) outcome_of(member);  // also of one that never started
    }
  }

  // ---- Other machines.

  Time time_after(double part) const {
    return static_cast<Time>(part * static_cast<double>(reference_ ? reference_->time : 3 * kSecond));
  }

  void add_agents() {
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

  void add_agent(int node, bool is_extra = false, int more_processes = 0) {
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

  Process* agent_of(int node) const {
    for (const auto& process : scheduler_.processes()) {
      if (process->lives() && process->name == "launcher of node " + std::to_string(node)) return process.get();
    }
    return nullptr;
  }

  void strike_agent(size_t i, Process& agent) {
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

  void cut_from_other_machines(Process& process, const Process& agent, Time until) {
    network_.cut(process, *launcher_, until);
    for (int other = 0; other < count(); ++other) {
      if (processes_[other] != nullptr && course_.outcomes[other].launcher != &agent)
        network_.cut(process, *processes_[other], until);
    }
  }

  void note_failure() {
    if (to_kill_ == kNever) to_kill_ = scheduler_.now() + kUntilKilled;
  }

  bool only_lost_run(const comm::StorePtr& store) const {
    for (int process = 0; process < count(); ++process) {
      if (processes_[process]->lives() && !comm::was_lost(store, launch_of(process))) return false;
    }
    return true;
  }

  void kill_the_rest() {
    for (int process = 0; process < count(); ++process) kill(process);
  }

  // One that stood still, or that the others have gone on without, need not end by itself.
  void kill(int process) {
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

  void hear_of_end(Process& process) {
    network_.tell_of_death(process);
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
    outcome.threads_left = scheduler_.threads_of(process) - 1;
    const std::string how = process.killed         ? "it was ended by signal 9 (Killed)"
                            : outcome.text.empty() ? ""
                                                   : "it ended with exit code 1";
    ends_.emplace_back(number, how);
  }

  Report report() {
    Report report;
    report.wrongs = wrongs_of(course_, reference_);
    for (const auto& wrong : network_.wrongs) report.wrongs.push_back(wrong);
    for (const int process : killed_by_launcher_) {
      report.wrongs.push_back("process " + std::to_string(process) +
                              " did not end by itself, so the launcher killed it");
    }
    if (!processes_.empty()) {
      const auto& weights = course_.outcomes[0].ranks[0].weights;
      for (size_t step = 0; step < weights.size(); ++step) report.found.weights[step] = weights[step];
      report.found.points = processes_[0]->points;
      report.found.time = course_.outcomes[0].end;
    }
    report.trace = scheduler_.trace();
    report.points = scheduler_.points();
    report.time = scheduler_.now();
    report.longest_end = longest_end(course_);
    for (const auto& outcome : course_.outcomes) report.ended_early |= !outcome.text.empty();
    return report;
  }

  const Plan plan_;
  const Reference* const reference_;
  const std::filesystem::path folder_;
  Scheduler scheduler_;
  Network network_;
  Disk disk_;
  const Consistency consistency_;  // of a job with servers
  Process* launcher_ = nullptr;
  std::vector<Process*> processes_ = {};  // those with ranks, by number
  Course course_;
  std::deque<std::pair<int, std::string>> ends_ = {};  // processes, and how; "": well
  Time to_kill_ = kNever;                              // the launcher ends what still runs
  std::vector<int> killed_by_launcher_ = {};
  const Dataset data_ = training_set();
};

}  // namespace

Report simulate(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log) {
  // It is never destroyed: threads of killed processes still wait in it.
  return (new Simulation(plan, reference, folder, with_log))->run();
}

}  // namespace lockstep::simulation
