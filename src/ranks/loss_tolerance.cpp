#include "loss_tolerance.hpp"

#include <exception>
#include <utility>

#include "rank_place.hpp"

namespace lockstep::comm {

LossTolerance::LossTolerance(const Rank& rank) : rank_(rank) {
  const RankPlace& place = RankPlace::of(rank_);
  place.world().allow_loss(place.world_rank);
}

LossTolerance::~LossTolerance() {
  try {
    end();
  } catch (const std::exception&) {  // every later call of this rank says so
  }
}

void LossTolerance::end() {
  if (std::exchange(ended_, true)) return;
  const RankPlace& place = RankPlace::of(rank_);
  place.world().forbid_loss(place.world_rank);
}

std::string why_lost(const Rank& rank, int other) {
  const RankPlace& place = RankPlace::of(rank);
  return place.world().why_lost(place.members.ranks[other]);
}

}  // namespace lockstep::comm
