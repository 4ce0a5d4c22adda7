// check_shared_folder: whether all machines of an elastic job see one folder of the run.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <filesystem>

namespace lockstep {

// In an elastic job any process may have to go on with the run's folder. Rank 0 leaves a file there, whose name is new
// in each generation, and all look for it. All ranks must call it. Throws Error that names the ranks that do not see
// it. Does nothing on one machine, or without a folder. Cost: two small exchanges, and a file.
void check_shared_folder(const std::filesystem::path& run, int generation, Rank& rank);

}  // namespace lockstep
