// Writes a tensor's sizes for errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/classic.hpp"

namespace lockstep {

// Returns "of sizes [3, 4]", or "undefined".
inline std::string sizes_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return classic_text("of sizes ", tensor.sizes());
}

}  // namespace lockstep
