// The jobs of the simulated processes; one is dropped as its process ends.
#pragma once

#include "comm/processes/job.hpp"
#include "scheduler.hpp"

#include <map>
#include <memory>

namespace lockstep::simulation {

using Jobs = std::map<const Process*, std::shared_ptr<comm::Job>>;
Jobs& jobs();

}  // namespace lockstep::simulation
