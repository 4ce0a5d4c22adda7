#include <lockstep/base/error.hpp>
#include <lockstep/scratch/try_gpu.hpp>

#include <algorithm>
#include <string>

namespace lockstep {
namespace {

// Lists the GPUs of the first type that LibTorch finds.
Devices gpus_of_one_type() {
  const Devices some = default_devices();
  return some[0].is_cpu() ? Devices() : some;
}

}  // namespace

c10::Device try_gpu(int i) {
  const Devices some = gpus_of_one_type();
  return i >= 0 && i < static_cast<int>(some.size()) ? some[i] : c10::Device(c10::kCPU);
}

Devices try_gpus(int count) {
  if (count < 1) throw Error("a run needs at least one device, not " + std::to_string(count));
  const Devices some = gpus_of_one_type();
  if (count > static_cast<int>(some.size())) return Devices(count, c10::Device(c10::kCPU));
  return {some.begin(), some.begin() + count};
}

Devices try_all_gpus() {
  return try_gpus(std::max(static_cast<int>(gpus_of_one_type().size()), 1));
}

}  // namespace lockstep
