// Reads and writes the members of an optimizer's states and options by name, through LibTorch's archives in memory.
#pragma once

#include <torch/serialize/archive.h>

#include <sstream>

#include "base/classic.hpp"

namespace lockstep {

// Gives an archive that reads what another one wrote. Nothing of its format gets into a file.
inline torch::serialize::InputArchive reread(torch::serialize::OutputArchive& archive) {
  Classic<std::stringstream> bytes;
  archive.save_to(bytes);
  torch::serialize::InputArchive read;
  read.load_from(bytes);
  return read;
}

}  // namespace lockstep
