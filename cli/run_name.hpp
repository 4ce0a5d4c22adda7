// Names a run that the user did not name: 2026-11-21_10-32-05_lenet_2xcpu.
#pragma once

#include <lockstep/devices/devices.hpp>

#include <ctime>
#include <filesystem>
#include <string>

namespace lockstep::cli {

// Gives a device list in few characters that are safe in a file's name: "cpu", "2xcpu", "cuda0", "cuda0-3", "2xcuda0",
// "cuda0+cuda2".
std::string short_name(const Devices& devices);

// Gives a name that no file in `runs_dir` has now: local time, the model `what` and its devices. If the name is taken,
// "-2", "-3", … follow. (Only making the folder claims the name: another run may choose it too.)
std::string new_run_name(const std::filesystem::path& runs_dir, std::time_t now, const std::string& what,
                         const Devices& devices);

}  // namespace lockstep::cli
