// The section's split_and_load and split_batch cut a batch into parts, one on each device.
//
// Each of k near-equal parts gets n / k of n samples, and the first n % k parts one more. Thread-safe. Cost: a view
// where a part already lies on its device, otherwise one copy of the part. A copy to a GPU goes through pinned memory,
// and the host does not wait for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/devices/devices.hpp>

#include <utility>
#include <vector>

namespace lockstep {

enum class Parts {
  near_equal,  // parts may differ by one sample
  even,        // a count of devices that does not divide the samples is an Error that names both numbers
};

// Cuts `data` [n, ...] along its first dimension into devices.size() parts and puts part i on devices[i].
// Section: `split_and_load` ("Data Distribution"): arange(20).view(4, 5) over two devices gives rows 0-1 and 2-3.
// Throws Error: no devices, a tensor without dimensions, Parts::even and n not divisible.
std::vector<at::Tensor> split_and_load(const at::Tensor& data, const Devices& devices, Parts parts = Parts::near_equal);

// Splits samples `x` [n, ...] and labels `y` [n, ...] over the devices (section: `split_batch`). Throws Error as
// split_and_load does, and if x and y differ in n.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> split_batch(const at::Tensor& x, const at::Tensor& y,
                                                                        const Devices& devices,
                                                                        Parts parts = Parts::near_equal);

}  // namespace lockstep
