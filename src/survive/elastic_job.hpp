// ElasticJob: keeps this process in a job that goes on when a process is gone. Each set of processes that trains
// together is a generation (generations.hpp), in which this_process() gives the process's place.
//
// A Succession (ranks/succession.hpp) passes enter() and leave() on to the ElasticJob. Make one per process, and use it
// on the thread that calls run(), except newer() and note_beginning(). Its own thread says twenty times a second that
// the process lives, and looks for a newer generation.
#pragma once

#include "comm/meeting/launch_environment.hpp"
#include "comm/silence_limit.hpp"
#include "generations.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>

namespace lockstep {

class ElasticJob {
 public:
  static bool is_asked_for();  // the launcher asks for it, in the environment, and this thread is no rank's

  // Makes the launcher start successors of killed processes from here on, and kill this process if it stands still for
  // `silence`, as in RunOptions. `folder` is the folder of the checkpoints, if there are any. Throws Error if the store
  // is not there or no longer there, or if this process has had an ElasticJob before.
  ElasticJob(std::stop_token stop, std::chrono::milliseconds silence, const std::string& folder = {});
  ~ElasticJob();
  ElasticJob& operator=(ElasticJob&&) = delete;

  // Enters the newest generation. A successor joins that generation once it has begun. Gives false if the job has ended
  // meanwhile. Throws Error if fewer processes are left than the job needs, the others have gone on without this one,
  // or the launcher is gone. Throws Stopped too.
  bool enter();

  // Call this when a process of the entered generation is gone. Waits until all agree on another generation, for some
  // seconds at most.
  void leave();

  void note_beginning();          // call it on rank 0 when all have met and have the state
  std::stop_token newer() const;  // a stop is requested once somebody wants to join: another generation follows
  int generation() const { return generation_; }  // counts from 0

 private:
  void live(const std::stop_token& end);

  const std::stop_token stop_;
  const comm::SilenceRange silence_;
  const comm::LaunchEnvironment launch_;
  comm::Generations generations_;
  bool entered_ = false;
  mutable std::mutex mutex_;
  std::stop_source newer_;           // guarded by mutex_
  std::atomic<int> generation_ = 0;  // the newest generation that has been entered
  std::jthread thread_;              // last, since it uses the others
};

}  // namespace lockstep
