#include "device_numbers.hpp"

#include <ATen/ops/full.h>

namespace lockstep {

void DeviceNumbers::set(Number& number, const c10::Device& device, double value) {
  if (!number.tensor.defined()) {
    number.tensor = at::full({}, value, at::TensorOptions(device).dtype(at::kFloat));
  } else if (number.value != value) {
    number.tensor.fill_(value);
  }
  number.value = value;
}

void DeviceNumbers::set_rate(const c10::Device& device, size_t group, double rate) {
  if (!device.is_cpu()) set(rates_[group], device, rate);
}

void DeviceNumbers::begin_step() {
  ++steps_;
  for (auto& [place, number] : counts_) number.is_used = false;
}

void DeviceNumbers::set_count(const c10::Device& device, int64_t count) {
  Number& number = counts_[place(device, count)];
  if (!std::exchange(number.is_used, true)) set(number, device, static_cast<double>(count - 1));
}

void DeviceNumbers::end_step() {
  if (!keeps_) std::erase_if(counts_, [](const auto& count) { return !count.second.is_used; });
  for (auto& [place, number] : counts_) number.value += number.is_used ? 1 : 0;
}

void DeviceNumbers::count_up() {
  for (auto& [place, number] : counts_) {
    if (number.is_used) number.tensor.add_(1);
  }
}

void DeviceNumbers::count_back(const at::Tensor& found) {
  for (auto& [place, number] : counts_) {
    if (number.is_used) number.tensor.sub_(found[0]);
  }
}

void DeviceNumbers::forget_step() {
  --steps_;
  for (auto& [place, number] : counts_) number.value -= number.is_used ? 1 : 0;
}

}  // namespace lockstep
