// Symbolic links in the place of what is to be made: what they lead to is made, and they stay.
#pragma once

#include <filesystem>
#include <system_error>
#include <vector>

namespace lockstep::io {

// What a path's last name stands for, if that is a link, or a link to links. It need not be there. Throws Error for
// links that lead nowhere but to each other.
std::filesystem::path behind_links(std::filesystem::path path);

// Makes the folder, and the missing ones above it; links to missing folders too. `made` gets those that were not there,
// the topmost first, also if one of the others fails. Another process may be making the same ones.
std::error_code make_folders(const std::filesystem::path& folder, std::vector<std::filesystem::path>* made = nullptr);

}  // namespace lockstep::io
