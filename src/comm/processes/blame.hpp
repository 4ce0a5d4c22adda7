// Blame: whom a rank waits for in vain, by what all ranks say of themselves, and the texts that say so. Functions of
// values, without threads or connections.
#pragma once

#include "calls.hpp"
#include "comm/meeting/roster.hpp"
#include "rank_state.hpp"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::comm {

// Why `call` will never come about, by what its rank and the others (by rank) say; "" if nothing speaks against it.
std::string contradiction(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster);

// Names a rank that has returned without a call that `rank` has made, which so will never come about; "" if there is
// none. For ranks whose waits nobody knows.
std::string early_return(int rank, const Calls& calls, const std::vector<RankState>& states, const Roster& roster);

// Names ranks that wait for each other, so that none will go on; "" if there are none. Old states do no harm: if ranks
// seem to wait for each other, none can have been the first to go on.
std::string standstill(const std::vector<RankState>& states, const Roster& roster);

// Names the ranks that `call` still lacks, and says what they do instead; "" if all have made it.
std::string missing_ranks(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster);

// `call` was waited for until its timeout.
std::string text_of_lateness(const OpenCall& call, std::chrono::milliseconds timeout,
                             const std::vector<RankState>& states, const Roster& roster);

// A process has no heartbeat any more.
std::string text_of_silence(int process, const Roster& roster);

// The user has asked for a stop, and nothing happens: this call is waited for, or the ranks of `process` have returned.
std::string text_of_stop(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster);
std::string text_of_stop_at_the_end(int process, const Roster& roster);

// Where the rank was when the run failed, and what it had done by then. `steps` of training; 0: nobody counts them.
std::string whereabouts(const OpenCall& call, const Calls& calls, int64_t steps, const Roster& roster);

// The same of a rank that was in no call.
std::string last_call(int rank, const Calls& calls, int64_t steps, const Roster& roster);

}  // namespace lockstep::comm
