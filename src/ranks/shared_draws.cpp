#include "shared_draws.hpp"

#include "comm/world.hpp"
#include "rank_place.hpp"

namespace lockstep {

void warn_of_shared_draws(const Rank& rank, const std::string& owner, const std::string& layer) {
  comm::World& world = comm::RankPlace::of(rank).world();
  if (layer.empty() || !rank.device().is_cpu() || world.ranks_here().size() == 1) return;
  if (world.shared_draws_seen.exchange(true)) return;
  comm::RankPlace::of(rank).warn(
      owner + ": " + layer +
      " draws from LibTorch's default generator, which all ranks of a process share, so that no run repeats another "
      "one. lockstep::Dropout (dropout.hpp) drops the same in every run, on any number of ranks");
}

}  // namespace lockstep
