#include "mixed_processors.hpp"

#include "comm/texts.hpp"
#include "devices/processor_kind.hpp"

#include <vector>

namespace lockstep {

std::string mixed_processors(const comm::World& world) {
  std::vector<std::string> kinds = world.processor_kinds();
  if (kinds.empty()) {
    for (const auto& device : world.devices()) kinds.push_back(device.is_cpu() ? "" : processor_kind(device));
  }
  size_t first = 0;
  while (first < kinds.size() && kinds[first].empty()) ++first;
  for (size_t rank = first + 1; rank < kinds.size(); ++rank) {
    if (kinds[rank].empty() || kinds[rank] == kinds[first]) continue;
    const auto name = [&](size_t index) { return comm::name_of(static_cast<int>(index), world.devices()); };
    return name(rank) + " computes on " + kinds[rank] + ", and " + name(first) + " on " + kinds[first];
  }
  return "";
}

}  // namespace lockstep
