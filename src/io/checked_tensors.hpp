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

// Throws Error for a file that cannot be read or has a wrong SHA-256. A file without a SHA-256 is accepted.
NamedTensors read_checked(const std::filesystem::path& file);

// The words with which the texts of these errors begin.
std::string cannot_load(const std::filesystem::path& file);

// Calls load() with the file's tensors. Its Errors name the file.
template <class Load>
void load_checked(const std::filesystem::path& file, const Load& load) {
  const NamedTensors tensors = read_checked(file);
  try {
    load(tensors);
  } catch (const Error& error) {
    throw Error(cannot_load(file) + ": " + error.what());
  }
}

}  // namespace lockstep::io
