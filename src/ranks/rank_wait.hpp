// These functions make a rank wait for its device. A CUDA graph's calls of NCCL have no timeout, and c10d's watchdog
// does not see them. So wait for a graph with these functions alone.
#pragma once

#include <lockstep/devices/devices.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "devices/device_wait.hpp"
#include "rank_place.hpp"

#include <exception>

namespace lockstep {

// Waits until the rank's GPU has come to `end`. Throws Error after the rank's timeout, and if the run has failed, since
// calls have then left no values.
inline void wait_for(const Rank& rank, const c10::Event& end) {
  const auto& place = comm::RankPlace::of(rank);
  const auto look = [&place] { place.world().check(place.world_rank); };
  wait_for(end,
           {.who = comm::name_of(place.world_rank, place.run->devices), .timeout = place.run->timeout, .look = look});
  place.world().check_values(place.world_rank);
}

// Waits for all work that the rank's current stream has been given. On the CPU it does not wait.
inline void synchronize(const Rank& rank) {
  if (!rank.device().is_cpu()) wait_for(rank, end_of_stream(rank.device()));
}

// Waits likewise, but throws nothing if the run has failed: use it for what a failed run leaves to the next one.
inline void drain(const Rank& rank) {
  if (rank.device().is_cpu()) return;
  const auto& place = comm::RankPlace::of(rank);
  wait_for(end_of_stream(rank.device()),
           {.who = comm::name_of(place.world_rank, place.run->devices), .timeout = place.run->timeout, .look = [] {}});
}

// Gives whether the rank's calls are queued on streams of NCCL's own. Then their Work's wait() keeps no host waiting.
inline bool queues_its_calls(Rank& rank) {
  return !rank.device().is_cpu() && rank.backend().getBackendName() == "nccl";
}

// Waits for all that may use the rank's memory. Over shared memory other ranks use that memory on their own streams, so
// the host waits for the whole GPU. Over NCCL this rank's stream alone uses the memory, and the whole GPU may be
// waiting for this rank's next call.
inline void synchronize_users(Rank& rank) {
  queues_its_calls(rank) ? synchronize(rank) : synchronize(rank.device());
}

// Use it after a failure: the current stream, and not the host, waits for a call that is still under way. Otherwise the
// next user of the call's memory, such as a later run in this process, could write there at the same time as the call.
inline void wait_on_stream(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    if (work) work->wait();
  } catch (const std::exception&) {  // this follows from the first failure, which is reported
  }
}

}  // namespace lockstep
