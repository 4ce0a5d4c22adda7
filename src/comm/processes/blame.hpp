// Blame: finds whom a rank waits for in vain, from what all ranks say of themselves, and words the errors. Its
// functions take values, without threads or connections.
#pragma once

#include "calls.hpp"
#include "comm/failure.hpp"
#include "comm/meeting/roster.hpp"
#include "rank_state.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm {

// Says why `call` will never come about, from what its rank and the others (by rank) say. Gives no failure if nothing
// speaks against the call.
Failure contradiction(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster);

// Names a rank that has returned without a call that `rank` has made, so that the call will never come about. Gives no
// failure if there is no such rank. Use it for ranks whose waits nobody knows.
Failure early_return(int rank, const Calls& calls, const std::vector<RankState>& states, const Roster& roster);

// Names ranks that wait for each other, so that none will go on; "" if there are none. Old states do no harm: if ranks
// seem to wait for each other, none can have been the first to go on.
std::string standstill(const std::vector<RankState>& states, const Roster& roster);

// Names the ranks that `call` still lacks, and says what they do instead; "" if all have made it.
std::string missing_ranks(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster);

// Gives the error of a call that a rank waited for until its timeout.
std::string text_of_lateness(const OpenCall& call, std::chrono::milliseconds timeout,
                             const std::vector<RankState>& states, const Roster& roster);

// Gives the error of a process that has no heartbeat any more.
std::string text_of_silence(int process, const Roster& roster);

// These give the errors of a user's stop while nothing happens: a rank waits for this call, or the ranks of `process`
// have returned.
std::string text_of_stop(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster);
std::string text_of_stop_at_the_end(int process, const Roster& roster);

// Says where the rank was when the run failed, and what it had done by then. `steps` counts steps of training, or is 0
// if nobody counts.
std::string whereabouts(const OpenCall& call, const Calls& calls, int64_t steps, const Roster& roster);

// Says which call each rank made last, by rank; none if it is not known. Use it for ranks whose waits nobody knows.
std::string last_calls(const std::vector<std::optional<Calls>>& by_rank, int64_t steps);

}  // namespace lockstep::comm
