// RunningJob: a job of several processes, with a launcher or without. Its processes can be signalled while the job
// runs. Later it tells what is left on the machine. Other functions say how soon such a job ought to end.
#pragma once

#include "leftovers.hpp"
#include "support/time_limits.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {

// How work begins that mostly waits: at once. With AddressSanitizer the next begins when one has ended, because fork()
// does not know its locks: a copy (cli/program.hpp) would wait for ever for one that another thread held.
#if defined(__has_feature)
inline constexpr auto kAtOnce = __has_feature(address_sanitizer) ? std::launch::deferred : std::launch::async;
#else
inline constexpr auto kAtOnce = std::launch::async;
#endif

// Calls work(0) … work(count - 1), four at the same time.
inline void side_by_side(int count, const std::function<void(int)>& work) {
  std::atomic<int> next{0};
  std::vector<std::future<void>> running;
  for (int thread = 0; thread < 4; ++thread) {
    running.push_back(std::async(kAtOnce, [&] {
      for (int i = next++; i < count; i = next++) work(i);
    }));
  }
  for (auto& one : running) one.get();
}

template <class Item>
void at_once(const std::vector<Item>& items, const std::function<void(const Item&)>& work) {
  side_by_side(static_cast<int>(items.size()), [&](int i) { work(items[i]); });
}

class RunningJob {
 public:
  using Clock = std::chrono::steady_clock;

  // Starts `words`, the program first. `folder` is the processes' working directory. Without a launcher the processes
  // wait `patience` seconds for each other before their run.
  RunningJob(int processes, bool launched, const Words& words, const std::filesystem::path& folder,
             const Words& variables = {}, const std::string& patience = "20")
      : launched_(launched), pids_(processes, -1), port_(free_port()) {
    const Words all = variables + left_.variables();
    auto surroundings = surroundings_with(all);
    surroundings.folder = folder;
    if (launched) {
      const Words noting = {"sh", "-c", "echo $$ >\"$0/$RANK.new\"; mv \"$0/$RANK.new\" \"$0/$RANK\"; exec \"$@\"",
                            notes_.path().string()};
      programs_.push_back(
          std::make_unique<Program>(Words{"launch", "-n", std::to_string(processes)} + noting + words, surroundings));
      sessions_.insert(programs_.back()->pid());
      return;
    }
    surroundings.program = words[0];
    const Words arguments(words.begin() + 1, words.end());
    for (int rank = 0; rank < processes; ++rank) {
      surroundings.environment = surroundings_with(as_rank(rank, processes, port_, patience) + all).environment;
      programs_.push_back(std::make_unique<Program>(arguments, surroundings));
      pids_[rank] = programs_.back()->pid();
      sessions_.insert(pids_[rank]);
    }
  }

  // Waits until each process has a number: the program itself may not have begun.
  void wait_for_processes() {
    const auto deadline = Clock::now() + std::chrono::seconds(60);
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      while (pids_[rank] < 0) {
        if (std::ifstream(notes_ / std::to_string(rank)) >> pids_[rank]) break;
        pids_[rank] = -1;
        if (Clock::now() > deadline) throw std::runtime_error("the launcher starts no processes");
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    }
  }

  // false: it has ended.
  bool send(int rank, int signal) const { return is_ours(pids_[rank]) && kill(pids_[rank], signal) == 0; }

  // To the launcher, or to each process if there is none.
  void send_to_job(int signal) const {
    for (const auto& program : programs_) program->send(signal);
  }

  bool wait_for(const std::string& text) {
    return std::all_of(programs_.begin(), programs_.end(), [&](auto& program) { return program->wait_for(text); });
  }

  // The launcher, with the outputs of all, or the processes.
  std::vector<Finished> finish() {
    std::vector<Finished> finished;
    for (const auto& program : programs_) finished.push_back(program->finish());
    return finished;
  }

  // After its end.
  Words leftovers() const { return left_.found(sessions_, launched_ ? Words{} : Words{port_}); }

 private:
  bool is_ours(pid_t pid) const { return left_.is_of_job(pid, sessions_); }

  const bool launched_;
  std::vector<pid_t> pids_;  // by rank; -1: not known yet
  const std::string port_;   // the store's port, without a launcher
  const ScratchFolder notes_;
  const Leftovers left_{};
  std::set<pid_t> sessions_;                        // programs' sessions: a copy of the test has the test's environment
  std::vector<std::unique_ptr<Program>> programs_;  // last: they end before the folders go
};

using Seconds = std::chrono::duration<double>;

inline constexpr Seconds kSoon{2};  // to the last process's end, on a machine that has nothing else to do

struct Kind {
  int processes;
  bool launched;
};
inline const std::vector<Kind> kKinds = {{2, true}, {3, true}, {2, false}, {3, false}};

inline std::string name_of(const Kind& kind) {
  return std::to_string(kind.processes) + " processes " + (kind.launched ? "of a launcher" : "without a launcher");
}

// How long undisturbed jobs take, by kind, side by side as the disturbed ones, and what is left in their folders.
struct Calibration {
  std::vector<Seconds> times = std::vector<Seconds>(kKinds.size());
  std::vector<ScratchFolder> folders = std::vector<ScratchFolder>(kKinds.size());

  Calibration(const Words& words, const Seconds& usual) : usual_(usual) {
    side_by_side(static_cast<int>(kKinds.size()), [&](int kind) {
      RunningJob job(kKinds[kind].processes, kKinds[kind].launched, words, folders[kind].path());
      job.wait_for_processes();
      const auto start = RunningJob::Clock::now();
      for (const auto& process : job.finish()) EXPECT_EQ(process.code, 0) << process.err;
      times[kind] = RunningJob::Clock::now() - start;
    });
  }

  // On a machine that takes longer than is usual for a job, longer too.
  Seconds soon() const { return kSoon * std::max(1.0, *std::max_element(times.begin(), times.end()) / usual_); }

 private:
  const Seconds usual_;
};

// The machine may stand still for a moment, so a few jobs may be late; none by a timeout of ours.
class Lateness {
 public:
  void count(const Seconds& took, const Seconds& limit) {
    if (took >= limit) ++late_;
    EXPECT_LT(took, 4 * limit);
  }
  int late() const { return late_; }

 private:
  std::atomic<int> late_{0};
};

// Matches what the others say if a process without a launcher dies before the meeting: it is one that does not come,
// and rank 0's takes the store along.
inline auto says_that_it_does_not_come(int rank) {
  using testing::HasSubstr;
  return testing::AnyOf(HasSubstr("which did not come to run()"), HasSubstr("the process of rank 0 is gone"),
                        HasSubstr("for the store that rank 0's process should keep"),
                        HasSubstr("cannot use the store at"),
                        HasSubstr("for rank " + std::to_string(rank) + " (cpu), which has not made this call"));
}
inline constexpr Seconds kSilentStore{10};  // time that a store may keep silent

}  // namespace lockstep
