// RankPlace: which ranks a Rank makes its calls with, and the world that can make groups of them.
#pragma once

#include <lockstep/rank.hpp>

#include "comm/members.hpp"
#include "comm/world.hpp"

#include <memory>
#include <utility>

namespace lockstep::comm {

class RankPlace {
 public:
  RankPlace(World& world, int world_rank, Members members)
      : world(world), world_rank(world_rank), members(std::move(members)) {}

  static Rank rank(World& world, int world_rank, Members members) {
    auto backend = world.backend(world_rank, members);
    auto place = std::make_shared<RankPlace>(world, world_rank, std::move(members));
    return Rank(std::move(place), std::move(backend));
  }

  static const RankPlace& of(const Rank& rank) { return *rank.place_; }

  World& world;
  const int world_rank;
  const Members members;
  int splits = 0;  // so far, equal on all members
};

}  // namespace lockstep::comm
