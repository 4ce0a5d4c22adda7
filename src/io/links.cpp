#include "links.hpp"

#include <lockstep/base/error.hpp>

namespace lockstep::io {

namespace fs = std::filesystem;

fs::path behind_links(fs::path path) {
  constexpr int most_links = 40;  // the system follows as many
  std::error_code error;
  for (int links = 0; fs::is_symlink(path, error); ++links) {
    if (links == most_links) throw Error("'" + path.string() + "' is a link that leads back to itself", {Error::file});
    path = path.parent_path() / fs::read_symlink(path, error);  // the link's text may be an absolute path
  }
  return path;
}

std::error_code make_folders(const fs::path& folder, std::vector<fs::path>* made) {
  const fs::path place = behind_links(folder);
  std::error_code error;
  bool is_new = fs::create_directory(place, error);
  if (error == std::errc::no_such_file_or_directory && place.has_parent_path() && place.parent_path() != place) {
    error = make_folders(place.parent_path(), made);
    if (!error) is_new = fs::create_directory(place, error);
  }
  if (is_new && made != nullptr) made->push_back(place);
  return error;
}

}  // namespace lockstep::io
