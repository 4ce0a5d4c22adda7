// The room ranks has run() and Rank, and what all ways to divide work use.
//   evaluate    accuracy and loss on a data set, computed on all ranks
//   functional  collectives through which gradients flow; lockstep.hpp leaves them out
//   rank        run() and Rank: one thread per device, and what ranks say to each other
//   traffic     how much a rank sends, and how long it waits
//
// This is how the room works. run() (src/ranks/run.cpp) picks a world and starts a thread for each rank. A Rank is the
// handle that passes calls on to the world's c10d backend. The worlds are in the room comm: threads of one process
// (src/comm/threads/exchange.hpp), or several processes (src/comm/processes/processes.cpp, docs/decisions/0006).
#pragma once

#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/ranks/traffic.hpp>
