#include "roster.hpp"

#include "comm/texts.hpp"

#include <numeric>

namespace lockstep::comm {

Range Roster::ranks_of(int process) const {
  int64_t begin = 0;
  for (int before = 0; before < process; ++before) begin += static_cast<int64_t>(by_process[before].size());
  return {begin, begin + static_cast<int64_t>(by_process[process].size())};
}

std::vector<int> Roster::list_of(int process) const {
  const Range ranks = ranks_of(process);
  std::vector<int> list(static_cast<size_t>(ranks.size()));
  std::iota(list.begin(), list.end(), static_cast<int>(ranks.begin));
  return list;
}

Devices Roster::devices() const {
  Devices all;
  for (const auto& devices : by_process) all.insert(all.end(), devices.begin(), devices.end());
  return all;
}

std::string Roster::name(int rank) const {
  return name_of(rank, devices());
}

std::string Roster::name_process(int process) const {
  const Range ranks = ranks_of(process);
  if (ranks.size() == 1) return name(static_cast<int>(ranks.begin));
  return "ranks " + std::to_string(ranks.begin) + " to " + std::to_string(ranks.end - 1);
}

}  // namespace lockstep::comm
