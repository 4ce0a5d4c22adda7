// A Roster says which ranks the processes of a job hold. Ranks are numbered by process, then by thread.
#pragma once

#include <lockstep/devices/devices.hpp>

#include "data/parts.hpp"

#include <string>
#include <vector>

namespace lockstep::comm {

struct Roster {
  std::vector<Devices> by_process;
  // Kinds of processor by rank (devices/processor_kind.hpp); empty: there is one process.
  std::vector<std::string> processor_kinds = {};
  bool shares_gpus = false;  // some ranks share a GPU over NCCL

  int processes() const { return static_cast<int>(by_process.size()); }
  Range ranks_of(int process) const;
  std::vector<int> list_of(int process) const;  // gives the process's ranks as indices
  Devices devices() const;                      // gives the devices of all ranks
  std::string name(int rank) const;             // gives "rank 1 (cpu)"
  std::string name_process(int process) const;  // gives "rank 1 (cpu)" or "ranks 2 to 3"
};

}  // namespace lockstep::comm
