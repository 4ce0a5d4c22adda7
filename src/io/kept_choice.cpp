#include "kept_choice.hpp"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "atomic_file.hpp"
#include "base/number_text.hpp"
#include "base/scramble.hpp"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;

// Gives "" if there is no such folder.
fs::path cache_folder() {
  const auto folder_in = [](const char* name) {
    const char* const value = std::getenv(name);
    return fs::path(value ? value : "");
  };
  if (const fs::path cache = folder_in("XDG_CACHE_HOME"); !cache.empty()) return cache / "lockstep";
  const fs::path home = folder_in("HOME");
  return home.empty() ? home : home / ".cache" / "lockstep";
}

fs::path file_of(const std::string& key) {
  uint64_t hash = 0;
  for (const char letter : key) hash = mix({hash, static_cast<unsigned char>(letter)});
  return cache_folder() / ("choice-" + hex_text(hash, 16));
}

}  // namespace

// The file has the word in its first line, and then the key for people.
std::string kept_choice(const std::string& key, const std::string& otherwise,
                        const std::function<std::string()>& measure) {
  if (cache_folder().empty()) return otherwise;
  const fs::path file = file_of(key);
  std::string kept;
  std::ifstream(file) >> kept;
  if (!kept.empty()) return kept;
  const fs::path own = file.string() + "." + std::to_string(getpid());
  std::error_code none;
  fs::create_directories(file.parent_path(), none);
  if (!std::ofstream(own)) return otherwise;
  fs::remove(own, none);
  const std::string measured = measure();
  try {
    write_file(own, measured + "\n" + key + "\n");
    fs::create_hard_link(own, file);  // throws if another process was first
  } catch (const std::exception&) {
  }
  fs::remove(own, none);
  std::ifstream(file) >> kept;
  return kept.empty() ? otherwise : kept;
}

}  // namespace lockstep::io
