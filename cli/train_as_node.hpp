// lockstep train --elastic under launchers that have no elastic jobs of this kind: mpirun, srun, torchrun, or variables
// set by hand.
#pragma once

#include <lockstep/ranks/elastic_bounds.hpp>

#include <optional>

namespace lockstep::cli {

// Under such a launcher, starts this program again as a child that trains, and again if it is killed. Gives the exit
// code of the job then. Gives nothing in a process of an elastic job, which is to train. Throws UsageError that says
// how to start such a job. To be called before any thread starts.
std::optional<int> train_as_node(const ElasticBounds& bounds);

}  // namespace lockstep::cli
