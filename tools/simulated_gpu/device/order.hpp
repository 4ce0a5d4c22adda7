// Order: which tasks come before which. A vector clock for each stream, each event and the host.
//
// All of it is the host's side and guarded by order(). Streams' threads never take that lock.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

namespace simulated {

using Clock = std::map<int, uint64_t>;  // tasks of a stream that come before, by its number

std::mutex& order();

// The tasks that the host has waited for. All host threads have one clock: so there are few false reports, and some
// races between streams of different threads stay hidden.
Clock& host_clock();

void join(Clock& clock, const Clock& other);

}  // namespace simulated
