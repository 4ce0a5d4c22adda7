// Stands in for cuda_graph.cpp in a build without CUDA.
#include <lockstep/base/error.hpp>

#include "cuda_graph.hpp"

namespace lockstep {

std::unique_ptr<Graph> make_cuda_graph() {
  throw Error("this build of lockstep has no CUDA parts, which CUDA graphs need");
}

bool is_recording() {
  return false;
}

}  // namespace lockstep
