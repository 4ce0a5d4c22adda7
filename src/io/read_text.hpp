// Reads a whole text file.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::io {

// Throws Error that names the file and the system's reason: the file is not there, or is a folder.
std::string read_text(const std::filesystem::path& file);

}  // namespace lockstep::io
