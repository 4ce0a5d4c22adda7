// LaunchEnvironment: what a launcher tells each process that it starts, in the environment.
//
// Known are torchrun's variables, which `lockstep launch` sets too, Open MPI's (mpirun) and SLURM's (srun). Only reads
// text: no connection is made here. Where several launchers stand in each other (srun torchrun …), the innermost
// counts, in the order above.
#pragma once

#include <lockstep/devices/devices.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::comm {

struct LaunchEnvironment {
  std::string launcher = {};  // "torchrun or lockstep launch", for texts
  int rank = 0;               // of this process among all
  int world_size = 1;         // the number of processes
  int local_rank = 0;         // among those of this machine
  int local_world_size = 1;
  int machine = 0;            // the rank of the machine's first process, by which machines are told apart
  std::string address = {};   // where rank 0's process, or the launcher, keeps the store; empty: loopback
  int port = 0;               // 0: rank 0's process takes a free one
  bool agent_store = false;   // the launcher keeps the store, and every process is a client
  bool tcp_store = false;     // which is c10d's, as torchrun's agent has it; else it is one of lockstep
  std::string job = {};       // no other job that runs on this machine has the same
  bool keep_going = false;    // true: the others go on without lost workers (LOCKSTEP_KEEP_GOING=1, with any launcher)
  bool mixed_builds = false;  // true: the processes may be of several builds (LOCKSTEP_MIXED_BUILDS=1, set for all)
  std::string key_file = {};  // of the job's key (LOCKSTEP_JOB_KEY_FILE); empty: it has none
  int member = -1;  // this process's number in an elastic job (LOCKSTEP_ELASTIC_MEMBER); -1: it is not elastic
  int fewest = 1;   // processes with which an elastic job goes on (LOCKSTEP_ELASTIC_MIN)
};

// The value of a variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Nothing: no launcher started this process. Throws Error that names the variables: some of a launcher's are missing,
// are no numbers, or contradict each other; several machines and no MASTER_ADDR.
std::optional<LaunchEnvironment> read_launch_environment(const Environment& environment);

// LOCKSTEP_RENDEZVOUS_TIMEOUT: how long processes wait for each other before a run. Throws Error: no number of seconds.
std::optional<std::chrono::milliseconds> rendezvous_timeout_in(const Environment& environment);

// Gives one of the machine's processes its part of the machine's device list: equal parts, in order. If the list has
// one entry, every process gets one rank on it. Throws Error that names both numbers.
Devices share_out(const Devices& devices, int local_rank, int local_world_size);

}  // namespace lockstep::comm
