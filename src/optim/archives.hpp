// LibTorch's archives, in memory: how the members of an optimizer's states and options are read and written by name.
#pragma once

#include <torch/serialize/archive.h>

#include <sstream>

#include "base/classic.hpp"

namespace lockstep {

// The archive to read of what was written. Nothing of its format gets into a file.
inline torch::serialize::InputArchive reread(torch::serialize::OutputArchive& archive) {
  Classic<std::stringstream> bytes;
  archive.save_to(bytes);
  torch::serialize::InputArchive read;
  read.load_from(bytes);
  return read;
}

}  // namespace lockstep
