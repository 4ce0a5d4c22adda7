// Launches: a task on a stream, and the memory that it uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "device.hpp"

namespace simulated {

// A tensor without the owner, as a kernel's arguments have it: it keeps no memory alive.
class View {
 public:
  explicit View(const at::Tensor& tensor);
  View(char* begin, size_t bytes);

  at::Tensor on_stream() const;  // call it on the stream's thread
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

using Task = std::function<void()>;

struct Launch {
  std::string what;
  std::vector<Use> uses;
  std::function<Task()> make;  // the task for one time, since a graph gives it to a stream again and again
};

void launch(Stream& stream, const Launch& launch);
void launch(Stream& stream, const std::string& what, const std::vector<Use>& uses, Task task);

void give(Stream& stream, const Launch& launch);  // now. With order()

bool is_recorded(const Stream& stream);

}  // namespace simulated
