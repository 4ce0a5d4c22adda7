#include "cuda_info.hpp"

namespace lockstep {

std::string gpu_name(int) {
  return {};
}

std::string gpu_kind(int) {
  return {};
}

std::string gpu_address(int) {
  return {};
}

}  // namespace lockstep
