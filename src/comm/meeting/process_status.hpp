// A process's status in a run: needed, dispensable, or lost. What lost_processes.hpp makes of it.
//
// Keys in the store: status/<process> ("needed", "dispensable", or "lost: " and why) and lost_count, which grows when a
// process was lost.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace lockstep::comm {

inline const std::string kNeeded = "needed";
inline const std::string kDispensable = "dispensable";

void begin_status(c10d::Store& store, int process);  // it is needed

// Gives the status afterwards. A process that has not begun has no status, and gets none.
std::string change_status(c10d::Store& store, int process, const std::string& from, const std::string& to);

std::string status_of(c10d::Store& store, int process);  // "": it has not begun
std::string reason_in(const std::string& status);        // why it was lost; "": it was not

// `process` of the run whose keys `store` holds is gone. Gives whether the others go on without it. `why` is a
// sentence. It is dropped if another process gave one before.
bool declare_lost(c10d::Store& store, int process, const std::string& why);

bool is_lost(c10d::Store& store, int process);

}  // namespace lockstep::comm
