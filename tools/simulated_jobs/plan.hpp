// Plan: what a seed makes of a run: how many processes there are, what they do, who keeps the store, and which faults
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
  lost_fsync,  // the disk says that it has bytes or names, and has not; later the power fails
};

// A fault, and where and when it comes.
struct Strike {
  Fault fault = Fault::kill;
  int victim = 0;   // a process, in an elastic job maybe a successor, if there is one
  int other = 0;    // the other side of a cut
  double part = 0;  // when: the part of the process's scheduling points that lies before it
  int step = 0;     // the step in which a rank does it
  int call = 0;     // the number of the disk's call
  int calls = 0;    // calls from a lost fsync until the power fails
  Time length = 0;  // how long a passing fault lasts

  bool is_harmless() const;  // the run must go on
  bool is_by_rank() const;   // a rank does it, in a step
};

struct Plan {
  uint64_t seed = 0;
  Program program = Program::data_parallel;
  int processes = 2;
  int ranks_per_process = 1;
  bool launcher = true;  // keeps the store, and sees who ends; otherwise process 0 keeps it
  bool checkpoints = false;
  bool resumes = false;  // an elastic job that goes on with what an earlier one has kept, if anything
  std::vector<Strike> strikes = {};

  int ranks() const { return processes * ranks_per_process; }
  bool is_elastic() const { return program == Program::elastic; }
  bool has(Fault fault) const;
  bool has_disk_fault() const;
  bool is_of(const std::string& kind) const;  // one of kKinds
  std::string text() const;
};

constexpr int kSteps = 20;
constexpr int kBetweenCheckpoints = 5;  // steps
constexpr const char* kKinds = "plain, elastic, \"lost fsync\" or \"two faults\"";

Plan plan_of(uint64_t seed);
std::vector<Plan> undisturbed();  // has one plan for each program and each number of processes and ranks

}  // namespace lockstep::simulation
