// Meeting: the processes of a job come together at the start of a run, and say farewell at its end.
//
// Each leaves its ranks and configuration in the store, and nobody starts before all have come. A process that runs
// another program or configuration is refused, with both shown. Every wait has a deadline.
#pragma once

#include <lockstep/base/error.hpp>

#include "comm/failure.hpp"
#include "rendezvous.hpp"
#include "roster.hpp"

#include <chrono>
#include <string>

namespace lockstep::comm {

// Gives the prefix of the job's k-th run, as this process counts. Give an equal k in all processes.
std::string run_prefix(int run);

// Says that this is a second job at a port where all processes of a first one have met: another process has this one's
// rank, or the job has another size. The first job goes on.
class NobodyMissed : public Error {
 public:
  using Error::Error;
};

// Leaves this process's devices and configuration, waits for those of all others, and compares. Throws Error if a
// process does not come before the deadline, reports a failure, has another configuration, or has the same rank.
Roster meet(c10d::Store& store, const LaunchEnvironment& launch, const Devices& devices_here,
            const std::string& configuration, const WaitLimit& limit);

// Says what ended this process's run before the meeting was complete, so that the others need not wait.
void call_off(c10d::Store& store, const Failure& failure);

// Call this from a launcher that keeps the store and sees how its processes end. Processes that wait for this one, or
// will, are told at once; the other processes of its run are told of a failure. A failure that a rank left before
// stays. A process that a user stopped counts as a stop to the processes that wait for its coming.
struct ProcessEnd {
  bool failed = false;
  bool stopped = false;        // a user asked for it
  std::string how;             // words that follow a colon: "it ended with exit code 7"
  bool lacked_memory = false;  // the kernel has probably killed it for want of memory
};
void announce_end(const StorePtr& store, const LaunchEnvironment& launch, const ProcessEnd& process);

// Says this process's last word in a run. The process that keeps the store waits for the others' last words, for at
// most `limit`; `dead` processes have none. Gives what is wrong with the store's values, if anything is.
Failure farewell(c10d::Store& store, const Rendezvous& rendezvous, std::chrono::milliseconds limit, int dead = 0);

}  // namespace lockstep::comm
