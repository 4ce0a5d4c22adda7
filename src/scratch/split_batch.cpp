#include <lockstep/base/error.hpp>
#include <lockstep/scratch/split_batch.hpp>

#include "data/parts.hpp"
#include "devices/upload.hpp"

#include <exception>
#include <string>

namespace lockstep {

namespace {

at::Tensor load(const at::Tensor& part, size_t index, const c10::Device& device) {
  try {
    return upload(part, device);
  } catch (const c10::Error& error) {
    std::throw_with_nested(Error("split_and_load: cannot put part " + std::to_string(index) + " on " + device.str() +
                                     ": " + error.what_without_backtrace(),
                                 {Error::machine}));
  }
}

}  // namespace

std::vector<at::Tensor> split_and_load(const at::Tensor& data, const Devices& devices, Parts how) {
  if (devices.empty()) {
    throw Error("split_and_load: the list of devices is empty; parse_devices(\"2xcpu\") gives two CPU ranks");
  }
  if (!data.defined() || data.dim() == 0) {
    throw Error("split_and_load: the data need a first dimension to split along, this tensor has none");
  }
  const int64_t samples = data.size(0);
  const int count = static_cast<int>(devices.size());
  if (how == Parts::even && samples % count != 0) {
    throw Error("split_and_load: " + std::to_string(samples) + " samples do not divide evenly over " +
                std::to_string(count) + " devices; use a batch size that is a multiple, or Parts::near_equal");
  }
  std::vector<at::Tensor> parts;
  for (int i = 0; i < count; ++i) {
    const Range part = part_of(samples, i, count);
    parts.push_back(load(data.narrow(0, part.begin, part.size()), i, devices[i]));
  }
  return parts;
}

std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> split_batch(const at::Tensor& x, const at::Tensor& y,
                                                                        const Devices& devices, Parts how) {
  if (x.defined() && y.defined() && x.dim() > 0 && y.dim() > 0 && x.size(0) != y.size(0)) {
    throw Error("split_batch: x holds " + std::to_string(x.size(0)) + " samples and y " + std::to_string(y.size(0)) +
                " labels; they must be as many");
  }
  return {split_and_load(x, devices, how), split_and_load(y, devices, how)};
}

}  // namespace lockstep
