#include "fashion_mnist_files.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include <cerrno>
#include <system_error>

#include "idx.hpp"

namespace lockstep::io {

std::string what_lacks(const std::filesystem::path& dir) {
  std::error_code error;
  const auto type = std::filesystem::status(dir, error).type();
  if (type == std::filesystem::file_type::not_found) return "no such folder";
  if (type == std::filesystem::file_type::none) return error.message();
  if (type != std::filesystem::file_type::directory) return "it is not a folder";
  // Checks that this process may search the folder; otherwise the folder would seem to lack the files.
  if (::faccessat(AT_FDCWD, dir.c_str(), X_OK, AT_EACCESS) != 0) return std::generic_category().message(errno);
  std::string missing;
  for (const char* name : fashion_mnist_files) {
    if (find_idx(dir, name).empty()) missing += (missing.empty() ? "it lacks " : ", ") + std::string(name);
  }
  return missing.empty() ? "" : missing + " (plain or .gz)";
}

std::filesystem::path find_fashion_mnist(const std::vector<std::filesystem::path>& places) {
  std::string looked_at;
  for (const auto& place : places) {
    std::string missing = what_lacks(place);
    if (missing.empty()) return place;
    looked_at += "\n  " + place.string() + ": " + missing;
  }
  throw Error(
      "Fashion-MNIST was not found in any of its usual places:" + looked_at +
          "\nInstall Debian's package dataset-fashion-mnist, or run `lockstep fetch-data`, or name a folder with "
          "the four IDX files (`data_dir` DIR), or train on a stand-in (`data` synthetic)",
      {Error::file});
}

}  // namespace lockstep::io
