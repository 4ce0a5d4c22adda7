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

struct StorePlace {
  std::string address = {};
  int port = 0;
};

struct LaunchEnvironment {
  std::string launcher = {};  // "torchrun or lockstep launch", for texts
  int rank = 0;               // of this process among all
  int world_size = 1;         // the number of processes
  int local_rank = 0;         // among those of this machine
  int local_world_size = 1;
  // The rank of the machine's first process, by which machines are told apart: in an elastic job of those that it began
  // with, in whose places successors stand.
  int machine = 0;
  std::string address = {};  // where rank 0's process, or the launcher, keeps the store; empty: loopback
  int port = 0;              // 0: rank 0's process takes a free one
  bool agent_store = false;  // the launcher keeps the store, and every process is a client
  bool tcp_store = false;    // which is c10d's, as torchrun's agent has it; else it is one of lockstep
  bool by_torchrun = false;  // this process is a worker of torchrun's agent, and not what lockstep launch started in it
  // A TCPStore in which the process with rank 0 leaves the port that it took (`port` is 0); its address, and its port.
  // Nothing: a file of the temporary folder holds it, for processes of one machine.
  std::optional<StorePlace> port_told_in = {};
  std::string job = {};       // no other job that runs on this machine has the same
  bool keep_going = false;    // true: the others go on without lost workers (LOCKSTEP_KEEP_GOING=1, with any launcher)
  bool mixed_builds = false;  // true: the processes may be of several builds (LOCKSTEP_MIXED_BUILDS=1, set for all)
  std::string key_file = {};  // of the job's key (LOCKSTEP_JOB_KEY_FILE); empty: it has none
  // What the user of a machine's launcher in an elastic job on several calls the address and the port. That launcher is
  // no process of the job itself, and `rank` is its machine's number.
  std::string node_address_name = {};
  int member = -1;  // this process's number in an elastic job (LOCKSTEP_ELASTIC_MEMBER); -1: it is not elastic
  int fewest = 1;   // processes with which an elastic job goes on (LOCKSTEP_ELASTIC_MIN)

  bool is_node() const { return !node_address_name.empty(); }
};

// The value of a variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Nothing: no launcher started this process. Throws Error that names the variables: some of a launcher's are missing,
// are no numbers, or contradict each other; several machines and no MASTER_ADDR.
std::optional<LaunchEnvironment> read_launch_environment(const Environment& environment);

// Where SLURM has started this process, if it is one of a step over several machines.
struct NodePlace {
  int node = 0;
  int nodes = 1;
  int tasks = 1;             // on all of them
  std::string address = {};  // of the first machine
  int port = 0;
};
std::optional<NodePlace> node_of_slurm(const Environment& environment);

// LOCKSTEP_RENDEZVOUS_TIMEOUT: how long processes wait for each other before a run. Throws Error: no number of seconds.
std::optional<std::chrono::milliseconds> rendezvous_timeout_in(const Environment& environment);

// LOCKSTEP_MIXED_PROCESSORS: whether processors of several kinds are allowed with a grain too. Throws Error: it is
// neither 0 nor 1.
bool mixed_processors_in(const Environment& environment);

// Gives one of the machine's processes its part of the machine's device list: equal parts, in order. If the list has
// one entry, every process gets one rank on it. Throws Error that names both numbers.
Devices share_out(const Devices& devices, int local_rank, int local_world_size);

}  // namespace lockstep::comm
