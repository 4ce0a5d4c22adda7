// Writes a tensor's sizes for errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/classic.hpp"

namespace lockstep {

// Returns "of sizes [3, 4]", or "undefined".
inline std::string sizes_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  Classic<std::ostringstream> text;
  text << "of sizes " << tensor.sizes();
  return text.str();
}

}  // namespace lockstep
