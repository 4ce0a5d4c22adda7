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

at::Tensor DeviceNumbers::rate(const c10::Device& device, size_t group, double rate) {
  if (device.is_cpu()) return {};
  Number& number = rates_[group];
  set(number, device, rate);
  return number.tensor;
}

void DeviceNumbers::begin_step() {
  ++calls_;
  for (auto& [place, number] : counts_) number.is_used = false;
}

at::Tensor DeviceNumbers::count(const c10::Device& device, int64_t count) {
  Number& number = counts_[{device.index(), calls_ - count}];
  if (!std::exchange(number.is_used, true)) set(number, device, static_cast<double>(count - 1));
  return number.tensor;
}

void DeviceNumbers::end_step() {
  std::erase_if(counts_, [](const auto& count) { return !count.second.is_used; });
  for (auto& [place, number] : counts_) ++number.value;
}

void DeviceNumbers::count_up() {
  for (auto& [place, number] : counts_) number.tensor.add_(1);
}

}  // namespace lockstep
