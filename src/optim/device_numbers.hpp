// DeviceNumbers keeps an optimizer's learning rates and counts of steps where its kernels read them: on a GPU as
// tensors there, whose places stay, so that a CUDA graph can hold the kernels. It writes a number when the host has
// another one.
//
// Use it from one thread. It waits for no GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace lockstep {

class DeviceNumbers {
 public:
  // Gives the group's rate, float []; undefined on the CPU, whose kernels take a number with float64's digits.
  at::Tensor rate(const c10::Device& device, size_t group, double rate);

  // Begins to prepare a step. Then count() gives, for a parameter whose step it is the `count`-th of, the tensor that
  // count_up() makes `count` of. Parameters of the same age share a tensor. end_step() ends it.
  void begin_step();
  at::Tensor count(const c10::Device& device, int64_t count);
  void end_step();

  // Queues the additions of one to the counts of the last step that was prepared. A graph may hold them.
  void count_up();

 private:
  struct Number {
    at::Tensor tensor;
    double value = 0;
    bool is_used = false;
  };
  static void set(Number& number, const c10::Device& device, double value);

  std::map<size_t, Number> rates_;  // rates by group
  // Counts by the device's index, and by the call of begin_step() that would have been the parameters' first.
  std::map<std::pair<c10::DeviceIndex, int64_t>, Number> counts_;
  int64_t calls_ = 0;
};

}  // namespace lockstep
