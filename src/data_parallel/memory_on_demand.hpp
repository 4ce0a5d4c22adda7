// Fills memory when an operator of LibTorch is about to read it, and frees the memory in between.
//
// LibTorch's C++ modules have no hooks around their forward. But every operator, in forward and in backward, is
// reported to callbacks of its thread (at::RecordFunction) before it runs. The memory of tensors names its filler. So a
// tensor and all views of it stay the same while memory comes and goes.
//
// Code that reads a tensor by its address alone is no operator, and finds no memory. LibTorch's data_ptr<T>() throws
// there. A kernel of one's own is seen if RECORD_USER_SCOPE_WITH_INPUTS around it names the tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep {

// Fills memories, which it knows by numbers.
class MemoryFiller {
 public:
  virtual ~MemoryFiller() = default;

  // An OperatorWatch calls this before an operator with tensors in these memories runs. Operators may call others.
  // Throw nothing: LibTorch would catch and lose the exception.
  virtual void before_operator(const std::vector<size_t>& memories) noexcept = 0;
  virtual void after_operator() noexcept = 0;
};

// While one lives, the operators of its thread are reported, and those of the backwards that the thread begins.
class OperatorWatch {
 public:
  OperatorWatch();
  ~OperatorWatch();
  OperatorWatch& operator=(OperatorWatch&&) = delete;

 private:
  const at::CallbackHandle handle_;
};

// These functions change the memory that `flat` and its views share; pass all of it as `flat`. empty_memory() gives the
// memory back. fill_memory() puts the memory of `from` there, which is as large; `from` then has none.
void empty_memory(const at::Tensor& flat, MemoryFiller& filler, size_t memory);
void fill_memory(const at::Tensor& flat, const at::Tensor& from, MemoryFiller& filler, size_t memory);
// Ends reporting operators to the filler.
void leave_memory(const at::Tensor& flat);
// Gives everybody who reads the memory, also by its address, an exception with this text.
void refuse_memory(const at::Tensor& flat, const std::string& text);

}  // namespace lockstep
