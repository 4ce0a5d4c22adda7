// Splitting samples over devices: near-equal parts, in order.
//
// n samples over k parts: every part gets n / k, the first n % k parts one more. Parts may be empty.
// Thread-safe. Cost: views where a part already lies on its device, otherwise one copy of the part.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/devices/devices.hpp>

#include <cstdint>
#include <utility>
#include <vector>

namespace lockstep {

// One of `count` equal partners, and where it computes: all that data handling needs to know of a rank.
struct Shard {
  int index = 0;
  int count = 1;
  c10::Device device = c10::Device(c10::kCPU);
};

// The half-open range [begin, end) of samples that one part holds.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Part `index` of `total` samples over `count` parts. Throws Error unless 0 <= index < count and total >= 0.
Range part_of(int64_t total, int index, int count);

enum class Split {
  near_equal,  // parts may differ by one sample
  even,        // a count that does not divide is an error that names both numbers
};

// Cuts `data` [n, ...] along its first dimension into devices.size() parts and puts part i on devices[i].
// Section: `split_and_load` ("Data Distribution"): arange(20).view(4, 5) over two devices gives rows 0-1 and 2-3.
// Throws Error: no devices, a tensor without dimensions, Split::even and n not divisible.
std::vector<at::Tensor> split_and_load(const at::Tensor& data, const Devices& devices, Split split = Split::near_equal);

// Splits both samples `x` [n, ...] and labels `y` [n, ...] over the devices (section: `split_batch`).
// Throws Error as split_and_load does, and if x and y differ in n.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> split_batch(const at::Tensor& x, const at::Tensor& y,
                                                                        const Devices& devices,
                                                                        Split split = Split::near_equal);

}  // namespace lockstep
