// Plan: what a seed makes of a run: how many processes, who keeps the store, and which fault comes when.
#pragma once

#include "scheduler.hpp"

#include <cstdint>
#include <string>
#include <utility>

namespace lockstep::simulation {

enum class Fault {
  none,
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
};

struct Plan {
  uint64_t seed = 0;
  int processes = 2;
  int ranks_per_process = 1;
  bool launcher = true;  // keeps the store, and sees who ends; otherwise process 0 keeps it
  Fault fault = Fault::none;
  int victim = 0;   // a process
  int other = 0;    // the other side of a cut
  double part = 0;  // when: the part of the process's scheduling points that lies before it
  int step = 0;     // of what a rank does
  int call = 0;     // of the disk
  Time length = 0;  // of what ends

  int ranks() const { return processes * ranks_per_process; }
  bool is_harmless() const;  // the run must go on
  std::string text() const;
};

constexpr int kSteps = 20;
constexpr std::pair<int, int> kWorlds[] = {{2, 1}, {3, 1}, {4, 1}, {2, 2}};  // processes, and ranks of each

Plan plan_of(uint64_t seed);
Plan undisturbed(int processes, int ranks_per_process);

}  // namespace lockstep::simulation
