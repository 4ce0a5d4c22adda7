#include "simulation.hpp"

#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "comm/meeting/job_store.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/meeting.hpp"
#include "disk.hpp"
#include "job_of_process.hpp"
#include "network.hpp"
#include "outcome.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "training.hpp"

#include <chrono>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

namespace lockstep::simulation {
namespace {

using namespace std::chrono_literals;

constexpr int kPort = 29'500;
constexpr Time kLimit = 120 * kSecond;
constexpr int kBetweenCheckpoints = 5, kKept = 2;
constexpr Time kUntilKilled = 5 * kSecond;  // what `lockstep launch` gives processes after the first failure

class Simulation {
 public:
  Simulation(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log)
      : plan_(plan),
        reference_(reference),
        folder_(folder),
        scheduler_(plan.seed, with_log, kLimit),
        network_(scheduler_),
        disk_(scheduler_.draw(2) == 0) {
    course_.plan = plan;
    course_.outcomes.resize(plan.processes);
    course_.host = plan.launcher ? "the launcher"
                   : plan.ranks_per_process == 1
                       ? "the process of rank 0 (cpu)"
                       : "the process of ranks 0 to " + std::to_string(plan.ranks_per_process - 1);
  }

  Report run() {
    for (int process = 0; process < plan_.processes; ++process) {
      Process& added = scheduler_.add_process("process " + std::to_string(process));
      added.environment = environment_of(process);
      course_.outcomes[process].ranks.resize(plan_.ranks_per_process);
    }
    if (plan_.launcher) launcher_ = &scheduler_.add_process("launcher");
    plant_the_fault();
    scheduler_.on_death = [this](Process& process) { hear_of_end(process); };
    for (int process = 0; process < plan_.processes; ++process) {
      scheduler_.start(*scheduler_.processes()[process], [this, process] { be_process(process); });
    }
    if (launcher_ != nullptr) scheduler_.start(*launcher_, [this] { be_launcher(); });
    course_.left = scheduler_.run();
    read_checkpoint();
    return report();
  }

 private:
  std::map<std::string, std::string> environment_of(int process) const {
    const std::string rank = std::to_string(process), count = std::to_string(plan_.processes);
    return {{"RANK", rank},
            {"WORLD_SIZE", count},
            {"LOCAL_RANK", rank},
            {"LOCAL_WORLD_SIZE", count},
            {"MASTER_ADDR", "127.0.0.1"},
            {"MASTER_PORT", std::to_string(kPort)},
            {"TORCHELASTIC_USE_AGENT_STORE", plan_.launcher ? "True" : "False"}};
  }

  comm::LaunchEnvironment launch_of(int process) const {
    const auto environment = environment_of(process);
    return *comm::read_launch_environment([&](const char* name) -> const char* {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  }

  void plant_the_fault() {
    Process& victim = *scheduler_.processes()[plan_.victim];
    Process& host = launcher_ != nullptr ? *launcher_ : *scheduler_.processes()[0];
    const auto point = static_cast<int64_t>(plan_.part * static_cast<double>(reference_ ? reference_->points : 1'000));
    const auto happens = [this](auto fault) {
      return [this, fault] {
        note_fault();
        fault();
      };
    };
    switch (plan_.fault) {
      case Fault::kill:
        return scheduler_.at_point(victim, point, happens([this, &victim] { scheduler_.kill(victim); }));
      case Fault::kill_host:  // a launcher has few points of its own, so it dies at a process's
        return scheduler_.at_point(victim, point, happens([this, &host] { scheduler_.kill(host); }));
      case Fault::stop:
        return scheduler_.at_point(victim, point, happens([this, &victim] { scheduler_.stop(victim, plan_.length); }));
      case Fault::cut:
        return scheduler_.at_point(victim, point, happens([this, &victim] {
                                     network_.cut(victim, *scheduler_.processes()[plan_.other],
                                                  scheduler_.now() + plan_.length);
                                   }));
      case Fault::slow:
        victim.slowness = plan_.length;
        return;
      case Fault::late:
        network_.lateness = plan_.length;
        return;
      case Fault::full_disk:
        disk_.call_of_fault = plan_.call;
        disk_.on_fault = happens([this] { disk_.is_full = true; });
        return;
      case Fault::power:
        disk_.call_of_fault = plan_.call;
        disk_.on_fault = happens([this] {
          for (const auto& process : scheduler_.processes()) scheduler_.kill(*process);
        });
        return;
      case Fault::none:
      case Fault::throws:
      case Fault::leaves:
      case Fault::differs:
      case Fault::unanswered:
        return;
    }
  }

  // ---- What the processes do.

  void be_process(int process) {
    Outcome& outcome = course_.outcomes[process];
    try {
      RunOptions options;
      options.timeout = 20s;
      options.rendezvous_timeout = 20s;
      run_ranks(process, options);
    } catch (const Error& error) {
      outcome.text = error.what();
    }
    outcome.end = scheduler_.now();
    outcome.over = true;
    scheduler_.note("run() has ended" + (outcome.text.empty() ? "" : ": " + outcome.text));
    jobs().erase(scheduler_.processes()[process].get());
  }

  void run_ranks(int process, const RunOptions& options) {
    const Devices devices(plan_.ranks(), c10::Device(c10::kCPU));
    const auto body = [&](Rank& rank) {
      const bool is_victim = process == plan_.victim && rank.index_in_process() == 0;
      const Listener listener{[&](int step) { return !is_victim || goes_on(rank, step); },
                              [&](int step, const Parameters& parameters) {
                                if (rank.index() == 0 && (step + 1) % kBetweenCheckpoints == 0)
                                  save(step + 1, parameters);
                              }};
      train(rank, data_, course_.outcomes[process].ranks[rank.index_in_process()], listener);
      if (is_victim && plan_.fault == Fault::unanswered) {
        note_fault();
        std::vector<at::Tensor> numbers{at::zeros({3})};
        rank.backend().allreduce(numbers, c10d::AllreduceOptions());
      }
    };
    lockstep::run(devices, body, options);
  }

  void note_fault() {
    course_.happened = true;
    course_.fault = scheduler_.now();
  }

  bool goes_on(Rank& rank, int step) {
    const Fault fault = plan_.fault;
    if (step != plan_.step || (fault != Fault::throws && fault != Fault::leaves && fault != Fault::differs))
      return true;
    note_fault();
    if (fault == Fault::throws) throw std::runtime_error("thrown by the test");
    if (fault == Fault::differs) rank.barrier();
    return fault == Fault::differs;
  }

  void save(int step, const Parameters& parameters) {
    RunState state{.epochs = 0, .steps = step, .seconds = 1, .history = {}, .config = "{}", .tensors = {}};
    put_under("model", parameters, state.tensors);
    CheckpointFolder(folder_ / "checkpoints", kKept, disk_).write(state);
    course_.saved = step;
  }

  // As the next run would.
  void read_checkpoint() {
    if (plan_.fault == Fault::power && course_.happened) disk_.crash();
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

  // ---- The launcher, as `lockstep launch` does it with real processes (cli/launch.cpp).

  void be_launcher() {
    const auto kept = comm::host_store("127.0.0.1", kPort, {});
    int left = plan_.processes;
    Time to_kill = kNever;
    while (left > 0) {
      while (ends_.empty()) {
        if (!scheduler_.wait(&ends_, to_kill) && scheduler_.now() >= to_kill) kill_the_rest();
      }
      const auto [process, how] = ends_.front();
      ends_.pop_front();
      --left;
      const bool failed = !how.empty();
      comm::announce_end(kept.store, launch_of(process), {failed, false, failed ? how : "it ended"});
      if (failed && to_kill == kNever) to_kill = scheduler_.now() + kUntilKilled;
    }
  }

  void kill_the_rest() {
    for (int process = 0; process < plan_.processes; ++process) {
      Process& one = *scheduler_.processes()[process];
      if (!one.lives()) continue;
      if (one.stopped_until <= scheduler_.now()) killed_by_launcher_.push_back(process);
      scheduler_.kill(one);
    }
  }

  void hear_of_end(Process& process) {
    network_.tell_of_death(process);
    if (process.number >= plan_.processes) return;
    Outcome& outcome = course_.outcomes[process.number];
    outcome.threads_left = scheduler_.threads_of(process) - 1;
    const std::string how = process.killed         ? "it was ended by signal 9 (Killed)"
                            : outcome.text.empty() ? ""
                                                   : "it ended with exit code 1";
    ends_.emplace_back(process.number, how);
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
    report.found.points = scheduler_.processes()[0]->points;
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
  Process* launcher_ = nullptr;
  Course course_;
  std::deque<std::pair<int, std::string>> ends_;  // processes, and how; "": well
  std::vector<int> killed_by_launcher_;
  const Dataset data_ = training_set();
};

}  // namespace

Report simulate(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log) {
  // It is never destroyed: threads of killed processes still wait in it.
  return (new Simulation(plan, reference, folder, with_log))->run();
}

}  // namespace lockstep::simulation
