// A LaunchEnvironment is what a launcher tells each process that it starts, in the environment.
//
// It knows torchrun's variables, which `lockstep launch` sets too, Open MPI's (mpirun) and SLURM's (srun). It only
// reads text, and makes no connection. If one launcher runs within another (srun torchrun …), the innermost counts, in
// the order above.
#pragma once

#include <lockstep/devices/devices.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace lockstep::comm {

struct LaunchEnvironment {
  std::string launcher = {};  // "torchrun or lockstep launch", for texts
  int rank = 0;               // this process's number among all
  int world_size = 1;         // the number of processes
  int local_rank = 0;         // its number among those of this machine
  int local_world_size = 1;
  std::string address = {};   // the address where rank 0's process, or the launcher, keeps the store; empty: loopback
  int port = 0;               // 0: rank 0's process takes a free one
  bool agent_store = false;   // the launcher keeps the store, and every process is a client
  bool tcp_store = false;     // the launcher's store is c10d's, as of torchrun's agent; else it is one of lockstep
  std::string job = {};       // the job's name: no other job that runs on this machine has the same
  bool mixed_builds = false;  // true: the processes may be of several builds (LOCKSTEP_MIXED_BUILDS=1, set for all)
  std::string key_file = {};  // the file of the job's key (LOCKSTEP_JOB_KEY_FILE); empty: the job has none
  int member = -1;  // this process's number in an elastic job (LOCKSTEP_ELASTIC_MEMBER); -1: it is not elastic
  int fewest = 1;   // the fewest processes with which an elastic job goes on (LOCKSTEP_ELASTIC_MIN)

  // Gives "process 0 of 2", for texts.
  std::string process_name() const { return "process " + std::to_string(rank) + " of " + std::to_string(world_size); }
};

// Gives the value of a variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Gives nothing if no launcher started this process. Throws Error that names a launcher's variables if some are
// missing, are no numbers, or contradict each other. Throws it too for several machines without MASTER_ADDR.
std::optional<LaunchEnvironment> read_launch_environment(const Environment& environment);

// Reads LOCKSTEP_RENDEZVOUS_TIMEOUT, the time for which processes wait for each other before a run. Throws Error if it
// is no number of seconds.
std::optional<std::chrono::milliseconds> rendezvous_timeout_in(const Environment& environment);

// Reads LOCKSTEP_MIXED_PROCESSORS, which says whether processors of several kinds are allowed with a grain too. Throws
// Error if it is neither 0 nor 1.
bool mixed_processors_in(const Environment& environment);

// Divides the machine's device list among its processes, equally and in order, and gives the devices of one process. If
// the list has one entry, every process gets one rank on it. Throws Error that names both numbers.
Devices share_out(const Devices& devices, int local_rank, int local_world_size);

}  // namespace lockstep::comm
