// SimulatedJob: one job of a Plan, from the first process to the last. Its processes run the library's run() over the
// simulated network; the launcher is as `lockstep launch` has it (simulated_launcher.cpp).
#pragma once

#include <lockstep/ranks/rank.hpp>

#include "comm/meeting/job_store.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "disk.hpp"
#include "network.hpp"
#include "outcome.hpp"
#include "simulation.hpp"
#include "training.hpp"

#include <array>
#include <chrono>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::simulation {

constexpr int kPort = 29'500;  // the store's port

class SimulatedJob {
 public:
  SimulatedJob(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log);
  Report run();
  bool can_be_gone_on_with() const;  // after run(): nobody has finished, and a next run can

 private:
  int count() const { return static_cast<int>(processes_.size()); }  // counts processes, with successors
  std::chrono::milliseconds silence() const;
  std::map<std::string, std::string> environment_of(int process, int place) const;
  comm::LaunchEnvironment launch_of(int process, int place) const;
  comm::LaunchEnvironment launch_of(int process) const { return launch_of(process, process); }
  Outcome& outcome_of(int process);
  void add_process(int process, int place);
  void start(int process);

  void note(size_t strike);  // notes that the strike has come
  std::function<void()> happens(
      size_t strike, std::function<void()> fault = [] {});
  void plant(size_t i, Process& victim);
  void plant_disk_faults();

  void be_process(int process);
  void run_ranks(int process, const RunOptions& options);
  void run_generations(int process, RunOptions options);
  bool is_victim(const Strike& strike, int process, const Rank& rank) const;
  bool goes_on(int process, Rank& rank, int step);
  void keep(int process, const RunState& state, const std::function<void()>& write);

  void look_at_folder();
  void read_checkpoint();
  void read_generations();
  Report report();

  // The launcher.
  void launch();
  void launch_elastic();
  Process& start(int member, int place);
  void say(const std::string& text);
  void note_failure();
  void kill_the_rest();
  void kill(int process);
  void hear_of_end(Process& process);

  const Plan plan_;
  const Reference* const reference_;
  const std::filesystem::path run_dir_;
  Scheduler scheduler_;
  Network network_;
  Disk disk_;
  std::set<int> writing_ = {};                 // processes, a checkpoint
  std::array<uint64_t, kSteps> optimizers_{};  // see Reference
  Process* launcher_ = nullptr;
  std::vector<Process*> processes_ = {};  // processes with ranks, by number
  Course course_;
  std::deque<std::pair<int, std::string>> ends_ = {};  // processes, and how; "": well
  Time to_kill_ = kNever;                              // the launcher ends what still runs
  std::vector<int> killed_by_launcher_ = {};
  const Dataset data_ = training_set();
};

}  // namespace lockstep::simulation
