// Launches: a task on a stream, and the memory that it uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "device.hpp"

namespace simulated {

// A tensor without its owner, as a kernel's arguments have it: it keeps no memory alive.
class View {
 public:
  explicit View(const at::Tensor& tensor);

  at::Tensor on_stream() const;  // for the stream's thread
  const char* begin() const { return data_; }
  const char* end() const;

 private:
  char* data_;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType type_;
};

struct Use {
  View view;
  bool writes;
};

inline bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

void launch(Stream& stream, const std::string& what, const std::vector<Use>& uses, std::function<void()> task);

}  // namespace simulated
