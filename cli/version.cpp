#include <torch/version.h>

#include "commands.hpp"

namespace lockstep::cli {

std::string version() {
  return LOCKSTEP_VERSION;
}

std::string torch_version() {
  return TORCH_VERSION;
}

}  // namespace lockstep::cli
