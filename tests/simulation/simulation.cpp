#include "simulation.hpp"

#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "comm/failure.hpp"
#include "comm/meeting/elastic_launch.hpp"
#include "comm/meeting/job_store.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/meeting.hpp"
#include "disk.hpp"
#include "job_of_process.hpp"
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
    for (int process = 0; process < plan_.processes; ++process) add_process(process);
    if (launcher_ != nullptr)
      scheduler_.start(*launcher_, [this] { plan_.is_elastic() ? launch_elastic() : launch(); });
    if (!plan_.is_elastic()) {
      for (int process = 0; process < plan_.processes; ++process) start(process);
    }
    course_.left = scheduler_.run();
    if (plan_.checkpoints) read_checkpoint();
    return report();
  }

 private:
  std::chrono::milliseconds silence() const { return plan_.seed % 2 == 0 ? kFixedSilence : 0s; }
  int count() const { return static_cast<int>(processes_.size()); }  // of processes, with successors

  std::map<std::string, std::string> environment_of(int process, int place) const {
    const std::string rank = std::to_string(place), count = std::to_string(plan_.processes);
    std::map<std::string, std::string> all{{"RANK", rank},
                                           {"WORLD_SIZE", count},
                                           {"LOCAL_RANK", rank},
                                           {"LOCAL_WORLD_SIZE", count},
                                           {"MASTER_ADDR", "127.0.0.1"},
                                           {"MASTER_PORT", std::to_string(kPort)},
                                           {"TORCHELASTIC_USE_AGENT_STORE", plan_.launcher ? "True" : "False"}};
    if (plan_.is_server()) all["LOCKSTEP_KEEP_GOING"] = "1";
    if (!plan_.is_elastic()) return all;
    all["LOCKSTEP_ELASTIC_MEMBER"] = std::to_string(process);
    all["LOCKSTEP_ELASTIC_MIN"] = "1";
    return all;
  }

  comm::LaunchEnvironment launch_of(int process) const {
    const auto& environment = processes_[process]->environment;
    return *comm::read_launch_environment([&](const char* name) -> const char* {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  }

  void add_process(int place) {
    const int process = count();
    Process& added = scheduler_.add_process("process " + std::to_string(process));
    added.environment = environment_of(process, place);
    processes_.push_back(&added);
    course_.outcomes.emplace_back().ranks.resize(plan_.ranks_per_process);
    for (size_t i = 0; i < plan_.strikes.size(); ++i) {
      if (plan_.strikes[i].victim == process) plant(i, added);
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

  void launch_elastic() {
    const auto kept = comm::host_store("127.0.0.1", kPort, {});
    comm::ElasticLaunch elastic(kept.store, launch_of(0).job, plan_.processes, kSuccessors,
                                {kUntilFirstBeat, plan_.seed % 4 == 0 ? 1s : 0s});
    for (int process = 0; process < plan_.processes; ++process) start(process);
    for (int left = plan_.processes; left > 0;) {
      if (ends_.empty()) scheduler_.wait(&ends_, std::min(to_kill_, scheduler_.now() + kLook));
      for (; !ends_.empty(); ends_.pop_front(), --left) {
        const auto& [process, how] = ends_.front();
        const bool failed = !how.empty(), killed = processes_[process]->killed && to_kill_ == kNever;
        const bool go_on = elastic.note_end(process, {failed, false, failed ? how : "it ended"}, killed);
        if (!go_on && failed) note_failure();
      }
      if (scheduler_.now() >= to_kill_) kill_the_rest();
      if (to_kill_ != kNever) continue;
      const auto now = elastic.look();
      for (const int dead : now.dead) kill(dead);
      for (const int late : now.late) kill(late);
      for (const auto& successor : elastic.successors()) {
        add_process(successor.place);
        start(count() - 1);
        ++left;
      }
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
    if (!stood) killed_by_launcher_.push_back(process);
    scheduler_.kill(one);
  }

  void hear_of_end(Process& process) {
    network_.tell_of_death(process);
    const auto found = std::find(processes_.begin(), processes_.end(), &process);
    if (found == processes_.end()) return;
    const auto number = static_cast<int>(found - processes_.begin());
    Outcome& outcome = course_.outcomes[number];
    outcome.threads_left = scheduler_.threads_of(process) - 1;
    const std::string how = process.killed         ? "it was ended by signal 9 (Killed)"
                            : outcome.text.empty() ? ""
                                                   : "it ended with exit code 1";
    ends_.emplace_back(number, how);
    scheduler_.wake_all(&ends_);
  }

  Report report() {
    Report report;
    report.wrongs = wrongs_of(course_, reference_);
    for (const auto& wrong : network_.wrongs) report.wrongs.push_back(wrong);
    for (const int process : killed_by_launcher_) {
      report.wrongs.push_back("process " + std::to_string(process) +
                              " did not end by itself, so the launcher killed it");
    }
    const auto& weights = course_.outcomes[0].ranks[0].weights;
    for (size_t step = 0; step < weights.size(); ++step) report.found.weights[step] = weights[step];
    report.found.points = processes_[0]->points;
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
