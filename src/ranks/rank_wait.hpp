// A rank's waits for its device. A CUDA graph's calls of NCCL have no timeout, and c10d's watchdog does not see them.
// So the host must not wait for a graph in any other way.
#pragma once

#include "devices/device_wait.hpp"
#include "rank_place.hpp"

namespace lockstep {

// Waits until the rank's GPU has come to `end`. Throws Error if the run has failed, since what calls left is then no
// value; and after its timeout.
inline void wait_for(const Rank& rank, const c10::Event& end) {
  const auto& place = comm::RankPlace::of(rank);
  const auto look = [&place] { place.world().check(place.world_rank); };
  wait_for(end,
           {.who = comm::name_of(place.world_rank, place.run->devices), .timeout = place.run->timeout, .look = look});
  place.world().check_values(place.world_rank);
}

// The same for all that the rank's current stream has been given. On the CPU nothing is waited for.
inline void synchronize(const Rank& rank) {
  if (!rank.device().is_cpu()) wait_for(rank, end_of_stream(rank.device()));
}

// The same, whether the run has failed or not: for what a failed run leaves to the next one.
inline void drain(const Rank& rank) {
  if (rank.device().is_cpu()) return;
  const auto& place = comm::RankPlace::of(rank);
  wait_for(end_of_stream(rank.device()),
           {.who = comm::name_of(place.world_rank, place.run->devices), .timeout = place.run->timeout, .look = [] {}});
}

}  // namespace lockstep
