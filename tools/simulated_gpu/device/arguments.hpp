// Arguments of one operator's call, made again: on the host of zeros, to learn the results' shapes, and on the stream
// of the memory itself.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch.hpp"

namespace simulated {

// Arguments with which the operator does its work, each time with other random numbers. They hold no tensors of the
// device.
struct RealArguments {
  using Make = std::function<c10::IValue()>;

  std::vector<Make> for_one_task() const;

  std::vector<Make> makes;
  std::vector<std::pair<size_t, at::Generator>> generators;  // in place of the makes of these numbers
};

class Arguments {
 public:
  using Make = RealArguments::Make;

  // `what` is the operator's name, for complaints.
  explicit Arguments(std::string what) : what_(std::move(what)) {}

  void add(const c10::IValue& value, bool writes);

  // A result's place whose size is to change: the operator is given memory of the old size that nobody else sees.
  void add_scratch(const at::Tensor& output);

  const std::vector<Make>& zeros() const { return zeros_; }
  const RealArguments& real() const { return real_; }
  const std::vector<Use>& uses() const { return uses_; }
  int device() const { return named_.value_or(current_device()); }

 private:
  void add_list(const std::vector<at::Tensor>& tensors, bool writes);
  void add_indices(const c10::List<std::optional<at::Tensor>>& tensors);
  Make real_of(const at::Tensor& tensor, bool writes);
  void check_host(const at::Tensor& tensor) const;

  std::string what_;
  std::vector<Make> zeros_;
  RealArguments real_;
  std::vector<Use> uses_;
  std::optional<int> named_;  // device that an argument names
};

torch::jit::Stack made(const std::vector<Arguments::Make>& arguments);

}  // namespace simulated
