#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/devices.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <exception>
#include <limits>
#include <optional>
#include <sstream>

#include "cpu_cores.hpp"
#include "cuda_info.hpp"

namespace lockstep {

namespace {

constexpr int max_ranks = 1024;  // beyond any machine: a slip of the keyboard, not a wish

const char* const forms =
    "a number (\"2\": the first two GPUs, or two CPU ranks), cpu, cuda, cuda:0,cuda:1, cpu,cpu, 2xcpu or 2xcuda:0";

c10::Device cpu() {
  return c10::Device(c10::kCPU);
}

c10::Device gpu(int index) {
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

std::string_view trim(std::string_view text) {
  const char* const blanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

// A text of digits as a number; one that is too large for an int comes as the largest.
std::optional<int> to_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool digits =
      !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) return std::nullopt;
  return error == std::errc::result_out_of_range ? std::numeric_limits<int>::max() : number;
}

// One specification being read; keeps the whole text for its errors.
class Parser {
 public:
  Parser(std::string_view spec, int gpu_count) : spec_(spec), gpu_count_(gpu_count) {}

  Devices parse() {
    const std::string_view text = trim(spec_);
    if (text.empty()) throw error("it is empty; use " + std::string(forms));
    if (const auto number = to_number(text)) return first(*number);
    if (text[0] == '-' && to_number(text.substr(1))) check_count(0);

    Devices devices;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      append_item(trim(text.substr(begin, end - begin)), devices);
      begin = end + 1;
    }
    const auto other_type = [&](c10::Device device) { return device.type() != devices[0].type(); };
    if (std::any_of(devices.begin(), devices.end(), other_type)) {
      throw error("it mixes CPU and GPU; ranks of one run exchange tensors of one device type, so use either");
    }
    return devices;
  }

 private:
  Devices first(int count) const {
    check_count(count);
    if (gpu_count_ == 0) return Devices(count, cpu());
    if (count > gpu_count_) {
      throw error(gpus_there() + "; use \"" + std::to_string(count) + "xcpu\" for CPU ranks or \"" +
                  std::to_string(count) + "xcuda:0\" for ranks that share one GPU");
    }
    return all_gpus(count);
  }

  // "cpu", "cuda", "cuda:1", or one of them after "Nx".
  void append_item(std::string_view item, Devices& devices) const {
    if (item.empty()) throw error("a device between or beside the commas is missing; use " + std::string(forms));
    const size_t x = item.find('x');
    const auto count = x == std::string_view::npos ? std::nullopt : to_number(trim(item.substr(0, x)));
    const std::string_view name = count ? trim(item.substr(x + 1)) : item;
    const int copies = count.value_or(1);
    check_count(copies);

    if (name == "cuda") {
      if (count) {
        throw error("\"" + std::string(item) +
                    "\" could mean two things: use a number for the first GPUs, or 2xcuda:0 for ranks that share one");
      }
      if (gpu_count_ == 0) throw error(gpus_there());
      const Devices all = all_gpus(gpu_count_);
      devices.insert(devices.end(), all.begin(), all.end());
    } else {
      devices.insert(devices.end(), copies, one_device(name));
    }
    check_count(static_cast<int>(devices.size()));
  }

  c10::Device one_device(std::string_view name) const {
    if (name == "cpu") return cpu();
    const std::string_view prefix = "cuda:";
    const auto index = name.substr(0, prefix.size()) == prefix ? to_number(name.substr(prefix.size())) : std::nullopt;
    if (!index) throw error("\"" + std::string(name) + "\" is no device; use " + std::string(forms));
    if (*index >= gpu_count_) throw error(std::string(name) + " is not there: " + gpus_there());
    return gpu(*index);
  }

  void check_count(int count) const {
    if (count < 1) throw error("a run needs at least one device");
    if (count > max_ranks) throw error("more than " + std::to_string(max_ranks) + " ranks are not supported");
  }

  Devices all_gpus(int count) const {
    Devices devices;
    for (int i = 0; i < count; ++i) devices.push_back(gpu(i));
    return devices;
  }

  std::string gpus_there() const {
    if (gpu_count_ == 0) return "LibTorch finds no GPU here; use \"2xcpu\" for two CPU ranks";
    return "the GPUs of this machine are " + to_string(all_gpus(gpu_count_));
  }

  Error error(const std::string& reason) const { return Error("devices \"" + std::string(spec_) + "\": " + reason); }

  std::string_view spec_;
  int gpu_count_;
};

}  // namespace

c10::Device try_gpu(int i) {
  return i >= 0 && i < gpu_count() ? gpu(i) : cpu();
}

Devices try_gpus(int count) {
  if (count < 1) throw Error("a run needs at least one device, not " + std::to_string(count));
  Devices devices(count, cpu());
  for (int i = 0; i < count && count <= gpu_count(); ++i) devices[i] = gpu(i);
  return devices;
}

Devices try_all_gpus() {
  return try_gpus(std::max(gpu_count(), 1));
}

Devices default_devices() {
  return gpu_count() > 0 ? try_all_gpus() : Devices(cpu_cores(), cpu());
}

Devices parse_devices(std::string_view spec) {
  return parse_devices(spec, gpu_count());
}

Devices parse_devices(std::string_view spec, int gpu_count) {
  return Parser(spec, gpu_count).parse();
}

std::string to_string(const Devices& devices) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < devices.size(); ++i) text << (i == 0 ? "" : ", ") << devices[i];
  text << "]";
  return text.str();
}

void check_devices(const Devices& devices) {
  if (devices.empty()) throw Error("the device list is empty; name at least one device, for example cpu");
  for (const auto& device : devices) {
    if (device.type() != devices[0].type()) {
      throw Error(to_string(devices) + " mixes device types; the ranks of one run exchange tensors of one type");
    }
    if (!device.is_cpu() && (!device.is_cuda() || !device.has_index() || device.index() >= gpu_count())) {
      throw Error("there is no device " + device.str() + "; this machine has the CPU and " +
                  std::to_string(gpu_count()) + " GPUs (cuda:0, cuda:1, … with LibTorch's CUDA build)");
    }
  }
}

void synchronize(const c10::Device& device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

int gpu_count() {
  return torch::cuda::device_count();
}

int cpu_cores() {
  const int cores = physical_cores(affinity_cpus());
  return std::max(1, static_cast<int>(std::min<double>(cores, std::floor(cpu_quota()))));
}

GpuInfo gpu_info(const c10::Device& device) {
  if (!device.is_cuda()) throw Error("gpu_info: " + device.str() + " is no GPU");
  check_devices({device});
  try {
    const auto [free_bytes, total_bytes] = c10::getDeviceAllocator(c10::kCUDA)->getMemoryInfo(device.index());
    return {device, gpu_name(device.index()), static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
  } catch (const c10::Error& error) {
    std::throw_with_nested(Error("cannot ask " + device.str() + " for its memory: " + error.what_without_backtrace()));
  }
}

std::vector<GpuInfo> gpus() {
  std::vector<GpuInfo> infos;
  for (int i = 0; i < gpu_count(); ++i) infos.push_back(gpu_info(gpu(i)));
  return infos;
}

}  // namespace lockstep
