// A tensor's sizes, for errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <sstream>
#include <string>

namespace lockstep {

// "of sizes [3, 4]", or "undefined".
inline std::string sizes_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << "of sizes " << tensor.sizes();
  return text.str();
}

}  // namespace lockstep
