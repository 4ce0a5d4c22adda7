// Warns of ranks that share a core, since they wait for each other.
#pragma once

#include <lockstep/devices/devices.hpp>

#include <cstdlib>
#include <string>

#include "comm/meeting/launch_environment.hpp"
#include "text.hpp"

namespace lockstep::cli {

// Gives the warning; "" if each of this machine's CPU ranks, over all processes of a launcher, has a core of its own.
inline std::string text_of_crowded_cores(const Devices& devices) {
  const auto launch = comm::read_launch_environment(std::getenv);
  const int ranks = launch && devices.size() == 1 ? launch->local_world_size : static_cast<int>(devices.size());
  const int cores = cpu_cores();
  if (!devices[0].is_cpu() || ranks <= cores) return "";
  return std::to_string(ranks) + " ranks share " + plural(static_cast<size_t>(cores), "core") +
         " and wait for each other; fewer are faster: --devices " + std::to_string(cores) + "xcpu";
}

}  // namespace lockstep::cli
