// Meeting: the processes of a job come together at the start of a run, and part at its end.
//
// Each leaves its ranks and its configuration in the store; nobody starts before all have come, and whoever runs
// another program or configuration is refused with both shown. Every wait has a deadline.
#pragma once

#include "layout.hpp"
#include "rendezvous.hpp"

#include <chrono>
#include <string>

namespace lockstep::comm {

// The job's k-th run as this process knows it, which must be the same k everywhere.
std::string run_prefix(int run);

// Leaves this process's devices and configuration, waits for all others', and compares. Throws Error: a process that
// does not come before the deadline, that reported a failure, or whose configuration differs.
Layout meet(c10d::Store& store, const LaunchEnvironment& launch, const Devices& devices_here,
            const std::string& configuration, const WaitLimit& limit);

// Says what ended this process's run before the meeting was complete, so that the others need not wait.
void call_off(c10d::Store& store, const std::string& text);

// For a launcher that keeps the store and sees how its processes end. Whoever waits for this process, or will, is told
// at once; so is, if the process failed or was free to go (see lost_processes.hpp), whoever is in a run with it. What a
// rank said before stays. `how` is words that follow a colon: "it ended with exit code 7".
struct AnnouncedEnd {
  std::string absence;   // what those are told who wait for it to come
  bool is_loss = false;  // those who are in a run with it go on
};
AnnouncedEnd announce_end(const StorePtr& store, const LaunchEnvironment& launch, bool failed, const std::string& how);

// Whether those who are in a run with this process have gone on without it, as it may be with one that still runs.
bool was_lost(const StorePtr& store, const LaunchEnvironment& launch);

// The last word of this process in a run. Who keeps the store waits for the others' last word, but never for long.
// `lost` processes have none. Gives what is wrong with what the store holds; "" if nothing is.
std::string farewell(c10d::Store& store, const Rendezvous& rendezvous, std::chrono::milliseconds limit, int lost = 0);

}  // namespace lockstep::comm
