#include "expendable.hpp"

#include <exception>
#include <utility>

#include "rank_place.hpp"

namespace lockstep::comm {

Expendable::Expendable(const Rank& rank) : rank_(rank) {
  const RankPlace& place = RankPlace::of(rank_);
  place.world().release(place.world_rank);
}

Expendable::~Expendable() {
  try {
    end();
  } catch (const std::exception&) {  // every later call of this rank says so
  }
}

void Expendable::end() {
  if (std::exchange(ended_, true)) return;
  const RankPlace& place = RankPlace::of(rank_);
  place.world().bind(place.world_rank);
}

std::string why_lost(const Rank& rank, int other) {
  const RankPlace& place = RankPlace::of(rank);
  return place.world().why_lost(place.members.ranks[other]);
}

}  // namespace lockstep::comm
