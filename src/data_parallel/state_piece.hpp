// StatePiece: a part of a tensor that other ranks have other parts of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct StatePiece {
  std::string name;                   // of the whole tensor, as are the sizes and strides; it has no gaps in memory
  std::vector<int64_t> sizes = {};    // none: a single number, of which a piece has all
  std::vector<int64_t> strides = {};  //
  int64_t begin = 0;                  // in the order of the whole tensor's memory
  at::Tensor values;                  // one dimension, but for a single number's
};

}  // namespace lockstep
