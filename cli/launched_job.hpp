// What `lockstep launch` is asked for, and what each of its processes finds in its environment.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "child_processes.hpp"
#include "comm/job_key.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/meeting.hpp"
#include "launch_messages.hpp"
#include "printed_once.hpp"

namespace lockstep::cli {

// The machines of an elastic job. Each has a launcher, of which the first keeps the job's store.
struct Nodes {
  int node = 0;  // this one
  int count = 1;
  int most = 1;  // more may come while the job runs
  // Where the first keeps the store. By a name of the job, if that has no port, which is possible on one machine.
  std::string address = {};
  int port = 0;
  std::string address_name = "--master";  // what the user calls these two
  std::string job = {};
  std::optional<comm::StorePlace> port_told_in = {};  // as LaunchEnvironment has it
  bool on_one_machine = false;
  std::string how_to_start_one = "Start it there with --node, --nodes and --master";
  // This process's among those of its machine, if the launcher's own launcher has started several there.
  std::optional<std::pair<int, int>> local = {};  // its number, and how many they are
};

struct LaunchFlags {
  int processes = 0;  // on this machine
  std::optional<int> threads = {};
  bool label = false;
  bool elastic = false;
  Nodes nodes = {};
  int fewest = 1;  // processes with which an elastic job goes on
  std::optional<int> max_restarts = {};
  int grace = 30;                       // seconds
  std::vector<std::string> words = {};  // the program and its arguments

  int all_processes() const { return processes * nodes.count; }
  int restarts() const { return max_restarts.value_or(elastic ? 10 : 0); }
};

// Where the job's processes find its store, and its key.
struct JobStore {
  std::string address;
  int port = 0;
  std::string key_file = {};  // empty: the job has none
};

// The variables of the process that has this place among all that run at the same time.
std::vector<std::string> variables(const LaunchFlags& flags, const JobStore& store, int attempt, int place);

// The same of an elastic job's process.
std::vector<std::string> elastic_variables(const LaunchFlags& flags, const JobStore& store, int place, int member);

// The launchers of an elastic job that another launcher has started: this one, and how many there are.
Nodes nodes_started_by(const comm::LaunchEnvironment& launch);

// Reads a process's variables as the process itself will.
comm::LaunchEnvironment environment_of(const std::vector<std::string>& variables);

// The program, found as this one where that is meant.
std::vector<std::string> program_words(const LaunchFlags& flags);

// Runs an elastic job's processes on this machine, and waits for its end.
ChildProcesses::Ending launch_elastic(const LaunchFlags& flags, LaunchMessages& messages);   // on any machine
ChildProcesses::Ending launch_as_agent(const LaunchFlags& flags, LaunchMessages& messages);  // without the store
comm::LaunchEnvironment environment_of_node(const LaunchFlags& flags);  // for the store of several machines
std::string checked_key_file(const Nodes& nodes);                       // throws Error: the network needs a key
bool is_on_loopback(const std::string& address);                        // or it is empty
std::chrono::milliseconds patience_with_others();                       // that are to come, LOCKSTEP_RENDEZVOUS_TIMEOUT

}  // namespace lockstep::cli
