// Has the flags of `lockstep launch`, and makes the environment of each of its processes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "child_processes.hpp"
#include "comm/job_key.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/meeting.hpp"
#include "launch_messages.hpp"

namespace lockstep::cli {

struct LaunchFlags {
  int processes = 0;
  std::optional<int> threads = {};
  bool label = false;
  bool elastic = false;
  int fewest = 1;  // the fewest processes with which an elastic job goes on
  std::optional<int> max_restarts = {};
  int grace = 30;                       // seconds of grace
  std::vector<std::string> words = {};  // the program and its arguments

  int restarts() const { return max_restarts.value_or(elastic ? 10 : 0); }
};

// Has the place of the job's store, and the job's key.
struct JobStore {
  std::string address;
  int port;
  std::string key_file;
};

// Gives the variables of the process that has this place among all that run at the same time. A process of an elastic
// job is a member.
std::vector<std::string> variables(const LaunchFlags& flags, const JobStore& store, int attempt, int place,
                                   std::optional<int> member = std::nullopt);

// Reads a process's variables as the process itself will.
comm::LaunchEnvironment environment_of(const std::vector<std::string>& variables);

// Gives the program and its arguments. The program "lockstep" is this one.
std::vector<std::string> program_words(const LaunchFlags& flags);

// Runs an elastic job's processes, and waits for its end.
ChildProcesses::Ending launch_elastic(const LaunchFlags& flags, LaunchMessages& messages);

}  // namespace lockstep::cli
