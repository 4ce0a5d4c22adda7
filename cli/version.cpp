#include <torch/version.h>

#include "commands.hpp"

namespace lockstep::cli {

std::string torch_version() {
  return TORCH_VERSION;
}

}  // namespace lockstep::cli
