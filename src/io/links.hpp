// Follows symbolic links to files and folders that are to be made: the target is made, and the links stay.
#pragma once

#include <filesystem>
#include <system_error>
#include <vector>

namespace lockstep::io {

// Follows the links in a path's last name, and returns where they lead, whether that exists or not. Throws Error for
// links that lead nowhere but to each other.
std::filesystem::path behind_links(std::filesystem::path path);

// Makes the folder and the missing ones above it, also where a link leads to a missing folder. `made` gets the folders
// that were missing, the topmost first, also if making another one fails. Another process may be making the same ones.
std::error_code make_folders(const std::filesystem::path& folder, std::vector<std::filesystem::path>* made = nullptr);

}  // namespace lockstep::io
