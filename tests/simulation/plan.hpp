// Plan: what a seed makes of a run: what its processes do, how many they are, who keeps the store, and which faults
// come when.
#pragma once

#include "scheduler.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::simulation {

enum class Program {
  data_parallel,
  elastic,  // the same in grains, in a job that goes on without killed processes, and which successors join
};

enum class Fault {
  kill,        // a process with ranks, at any point
  kill_host,   // the one that keeps the store
  stop,        // it stands still, and goes on
  slow,        // each of its points may take long
  late,        // messages may be late
  cut,         // nothing passes between two processes for some time
  throws,      // a rank throws in a step
  leaves,      // a rank returns early
  differs,     // a rank makes another call than the others
  unanswered,  // a rank makes one call more than the others, and does not wait for it
  full_disk,   // rank 0 cannot write a checkpoint
  power,       // the machine loses its power while rank 0 writes one
  lost_fsync,  // the disk says that bytes or names are on it, and they are not; later the power fails
  // Of a machine in an elastic job of several, other than the first; the victim is its number:
  kill_agent,   // its launcher is killed, and its processes with it
  restart,      // the same, and a new launcher comes later
  stop_agent,   // its launcher stands still, and goes on
  stop_node,    // its processes too
  cut_agent,    // nothing passes between its launcher and the first one
  cut_node,     // nor between its processes and others
  slow_agent,   // each point of its launcher may take long
  late_agent,   // its launcher comes late, or too late
  twin_agent,   // another launcher says that it is that machine
  other_agent,  // one that was started otherwise says so
};

// A fault, and where and when it comes.
struct Strike {
  Fault fault = Fault::kill;
  int victim = 0;   // a process, in an elastic job maybe a successor, if there is one; or a machine
  int other = 0;    // the other side of a cut
  double part = 0;  // when: the part of the process's scheduling points that lies before it
  int step = 0;     // of what a rank does
  int call = 0;     // of the disk
  int calls = 0;    // from a lost fsync until the power fails
  int points = 0;   // from that part on, of a machine's launcher
  Time length = 0;  // of what ends

  bool is_harmless() const;  // the run must go on
  bool is_by_rank() const;   // a rank does it, in a step
  bool is_of_node() const;   // it comes to a machine
};

struct Plan {
  uint64_t seed = 0;
  Program program = Program::data_parallel;
  int processes = 2;
  int ranks_per_process = 1;
  bool launcher = true;  // keeps the store, and sees who ends; otherwise process 0 keeps it
  int nodes = 1;         // machines of an elastic job, with as many processes each
  double grows = 0;      // above 0: one more comes after this part of the job's time
  bool checkpoints = false;
  bool resumes = false;  // an elastic job that goes on with what an earlier one has kept, if anything
  std::vector<Strike> strikes = {};

  int ranks() const { return processes * ranks_per_process; }
  bool is_elastic() const { return program == Program::elastic; }
  bool has_agents() const { return nodes > 1; }
  int most_nodes() const { return nodes + (grows > 0 ? 1 : 0); }
  int places() const { return processes / nodes; }  // on each machine
  bool has(Fault fault) const;
  bool has_disk_fault() const;
  bool is_of(const std::string& kind) const;  // one of kKinds
  std::string text() const;
};

constexpr int kSteps = 20;
constexpr int kBetweenCheckpoints = 5;  // steps
constexpr const char* kKinds = "plain, elastic, machines, \"lost fsync\" or \"two faults\"";
constexpr Time kAgentSilence = kSecond;  // after which another machine counts as gone. The real one is 1 to 3 s

Plan plan_of(uint64_t seed);
std::vector<Plan> undisturbed();  // of each program and each number of processes and ranks

}  // namespace lockstep::simulation
