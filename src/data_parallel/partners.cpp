#include "partners.hpp"

#include "ranks/rank_place.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace lockstep {

// The ranks stand in a circle, those of one machine together. Each keeps the slice of the one that stands so far before
// it as the largest machine has ranks. That is another machine's, unless the largest has more than half of the circle:
// then as many of its ranks as there are others have partners on other machines, and all others have.
std::vector<int> kept_ranks(const std::vector<int>& machines) {
  std::map<int, std::pair<int, int>> of_machine;  // its first rank, and how many it has
  const int count = static_cast<int>(machines.size());
  for (int rank = 0; rank < count; ++rank)
    ++of_machine.emplace(machines[rank], std::pair(rank, 0)).first->second.second;
  std::vector<int> circle(machines.size()), kept(machines.size());
  for (int rank = 0; rank < count; ++rank) circle[rank] = rank;
  std::stable_sort(circle.begin(), circle.end(), [&](int one, int other) {
    return of_machine.at(machines[one]).first < of_machine.at(machines[other]).first;
  });
  int largest = 0;
  for (const auto& [machine, ranks] : of_machine) largest = std::max(largest, ranks.second);
  const int distance = largest == count ? 1 : largest;
  for (int place = 0; place < count; ++place) kept[circle[place]] = circle[(place + count - distance) % count];
  return kept;
}

std::vector<Partners> partners_of_all(const Rank& rank) {
  const auto& place = comm::RankPlace::of(rank);
  const comm::World& world = place.world();
  std::vector<int> machines;
  for (const int member : place.members.ranks) machines.push_back(world.machine_of(member));
  const std::vector<int> kept = kept_ranks(machines);
  std::vector<Partners> all(kept.size());
  for (int one = 0; one < static_cast<int>(kept.size()); ++one) {
    all[one].kept = kept[one];
    all[kept[one]].keeper = one;
  }
  return all;
}

Partners partners_of(const Rank& rank) {
  return partners_of_all(rank)[static_cast<size_t>(rank.index())];
}

}  // namespace lockstep
