// Traffic: counts how much one rank sends, and how long its thread is in calls to other ranks.
//
//   const auto traffic = std::make_shared<lockstep::Traffic>();
//   lockstep::Rank counted = lockstep::Traffic::observed(rank, traffic);
//   lockstep::DataParallel net(MyNet(), counted);  // whatever is made on `counted`, or calls it, is counted
//   traffic->sent = 0;                             // leaves out what making the replicas equal took
//
// Use it from the thread that makes the calls. It costs two readings of the clock per call.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <memory>
#include <utility>

namespace lockstep {

// In an allreduce of n bytes among k ranks each rank counts as sending 2 (k - 1) / k n, as in a ring. A broadcast, a
// reduce or an alltoall counts (k - 1) / k n; the first two as in a chain. A gather or a scatter counts a rank's own
// part once for each other rank. Threads of one process may in fact send nothing, since they share memory.
struct Traffic {
  double sent = 0;     // bytes sent
  double seconds = 0;  // seconds in calls: posting, polling and waiting

  // Gives a rank that does what `rank` does. `traffic` counts the new rank's calls, and those of groups made from it.
  static Rank observed(const Rank& rank, std::shared_ptr<Traffic> traffic);
};

[[deprecated("lockstep::Traffic::observed")]] inline Rank observed(const Rank& rank, std::shared_ptr<Traffic> traffic) {
  return Traffic::observed(rank, std::move(traffic));
}

}  // namespace lockstep
