// Reads and writes tensors in a safetensors file whose header has a SHA-256 of everything.
#pragma once

#include <lockstep/base/error.hpp>

#include <filesystem>
#include <map>
#include <string>

#include "safetensors.hpp"

namespace lockstep::io {

// The header gets `metadata` and PyTorch's {"format": "pt"}. Throws Error as write_safetensors does.
void write_checked(const std::filesystem::path& file, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata = {});

// Throws Error for a file that cannot be read, or whose SHA-256 is wrong. A file without a SHA-256 is accepted.
// `metadata`, if any, gets the texts of its header.
NamedTensors read_checked(const std::filesystem::path& file, std::map<std::string, std::string>* metadata = nullptr);

// Gives the words with which the texts of these errors begin.
std::string cannot_load(const std::filesystem::path& file);

// Calls load() with the file's tensors and texts. Its Errors name the file.
template <class Load>
void load_checked(const std::filesystem::path& file, const Load& load) {
  std::map<std::string, std::string> metadata;
  const NamedTensors tensors = read_checked(file, &metadata);
  try {
    load(tensors, metadata);
  } catch (const Error& error) {
    throw Error(cannot_load(file) + ": " + error.what(), {Error::file});
  }
}

}  // namespace lockstep::io
