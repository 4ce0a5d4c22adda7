// DeviceNumbers keeps the learning rates and counts of steps that an optimizer's kernels read: as tensors on the
// device, whose places stay, so that a CUDA graph can hold the kernels. A number is written when the host has another
// one.
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
  // Sets a group's rate. On the CPU it does nothing: the kernels there take a number with float64's digits.
  void set_rate(const c10::Device& device, size_t group, double rate);
  const at::Tensor& rate(size_t group) const { return rates_.at(group).tensor; }  // gives float []

  // Between these calls name the count of each parameter that steps: count_up() makes that number of it. Parameters of
  // the same age share a tensor.
  void begin_step();
  void set_count(const c10::Device& device, int64_t count);
  void end_step();

  // Queues the additions of one. A graph may hold them.
  void count_up();

  // For steps that a device may leave out: count_back() queues that a count stays as it was where `found` is 1, and
  // forget_step() tells the host that the device has left out a step, however many came since.
  void count_back(const at::Tensor& found);
  void forget_step();

  void keep() { keeps_ = true; }  // keeps all tensors from now on, since a graph has their addresses

  // Gives the tensor, float [], of a parameter that steps for the `count`-th time.
  const at::Tensor& count(const c10::Device& device, int64_t count) const {
    return counts_.at(place(device, count)).tensor;
  }

 private:
  using Place = std::pair<c10::DeviceIndex, int64_t>;
  struct Number {
    at::Tensor tensor;
    double value = 0;
    bool is_used = false;
  };
  static void set(Number& number, const c10::Device& device, double value);
  Place place(const c10::Device& device, int64_t count) const { return {device.index(), steps_ - count}; }

  std::map<size_t, Number> rates_;  // rates by group
  std::map<Place, Number> counts_;  // counts by the device, and by the number of steps before the parameters' first
  int64_t steps_ = 0;
  bool keeps_ = false;
};

}  // namespace lockstep
