// ElasticJob: this process in a job that goes on when a process is gone. Each set of processes that trains together is
// a generation (comm/meeting/generations.hpp), and has a run() of its own:
//
//   while (job.enter()) {
//     try { run(…); if (all is done) break; } catch (const comm::ProcessDied&) { job.leave(); }
//   }
//
// Within a generation this_process() tells the process's place in it. One per process, used by the thread that calls
// run(), but for newer() and note_beginning(). Its thread says twenty times a second that the process lives, and looks
// for a newer generation.
#pragma once

#include "comm/meeting/generations.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "comm/silence_limit.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <stop_token>
#include <thread>

namespace lockstep {

class ElasticJob {
 public:
  static bool is_asked_for();  // by the launcher, in the environment

  // From here on the launcher starts successors of processes that are killed. It kills this one if it stands still for
  // `silence`, as RunOptions has it. The launcher is told in which folder checkpoints are kept, if any. Throws Error:
  // the store is not there, or no longer; this process has had an ElasticJob before.
  ElasticJob(std::stop_token stop, std::chrono::milliseconds silence, const std::string& folder = {});
  ~ElasticJob();
  ElasticJob(const ElasticJob&) = delete;
  ElasticJob& operator=(const ElasticJob&) = delete;

  // Enters the newest generation. A successor joins it, once it has begun. False: the job has ended meanwhile. Throws
  // Error: fewer processes are left than the job needs, the others have gone on without this one, or the launcher is
  // gone. Throws Stopped.
  bool enter();

  // A process of the entered generation is gone. Waits until all agree on another one, for some seconds at most.
  void leave();

  void note_beginning();                          // all have met and have the state; rank 0 calls it
  std::stop_token newer() const;                  // requested once somebody wants to join, so that another one follows
  int generation() const { return generation_; }  // from 0

 private:
  void live(const std::stop_token& end);

  const std::stop_token stop_;
  const comm::SilenceRange silence_;
  const comm::LaunchEnvironment launch_;
  comm::Generations generations_;
  bool entered_ = false;
  mutable std::mutex mutex_;
  std::stop_source newer_;           // guarded by mutex_
  std::atomic<int> generation_ = 0;  // the newest that has been entered
  std::jthread thread_;              // last, since it uses the others
};

}  // namespace lockstep
