#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <exception>
#include <iterator>
#include <limits>
#include <optional>
#include <set>

#include "base/classic.hpp"
#include "check_devices.hpp"
#include "cpu_cores.hpp"
#include "cuda_info.hpp"

namespace lockstep {

namespace {

constexpr int max_ranks = 1024;  // more than any machine needs: a larger number is a typing error

const char* const forms =
    "a number (\"2\": the first two GPUs, or two CPU ranks), cpu, cuda, cuda:0,cuda:1, cpu,cpu, 2xcpu or 2xcuda:0 "
    "(LibTorch's names: cuda is NVIDIA's and AMD's GPUs, xpu Intel's, mps Apple's)";

c10::Device cpu() {
  return c10::Device(c10::kCPU);
}

// Finds LibTorch's type of accelerator that `name` means. LibTorch's device for tests has the name that its user gave.
std::optional<c10::DeviceType> type_named(std::string_view name) {
  for (int number = 0; number < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++number) {
    const auto type = static_cast<c10::DeviceType>(number);
    if (at::isAccelerator(type) && c10::DeviceTypeName(type, /*lower_case=*/true) == name) return type;
  }
  return std::nullopt;
}

// Lists the GPUs of one type. LibTorch has no guard for a type for which it was not built.
Devices gpus_of(c10::DeviceType type) {
  Devices devices;
  if (!at::isAccelerator(type) || !c10::impl::hasDeviceGuardImpl(type)) return devices;
  const auto count = c10::impl::VirtualGuardImpl(type).deviceCount();
  for (c10::DeviceIndex index = 0; index < count; ++index) devices.emplace_back(type, index);
  return devices;
}

Devices of_type(c10::DeviceType type, const Devices& devices) {
  Devices some;
  std::copy_if(devices.begin(), devices.end(), std::back_inserter(some),
               [&](c10::Device device) { return device.type() == type; });
  return some;
}

Devices of_first_type(const Devices& devices) {
  return devices.empty() ? devices : of_type(devices[0].type(), devices);
}

std::string_view trim(std::string_view text) {
  const char* const blanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

// Reads a text of digits as a number. A number too large for an int becomes the largest.
std::optional<int> to_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool digits =
      !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) return std::nullopt;
  return error == std::errc::result_out_of_range ? std::numeric_limits<int>::max() : number;
}

// Reads one specification, and keeps the whole text for its errors.
class Parser {
 public:
  Parser(std::string_view spec, const Devices& gpus) : spec_(spec), gpus_(gpus) {}

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
      throw error("it mixes device types; ranks of one run exchange tensors of one type, so use one of them");
    }
    return devices;
  }

 private:
  Devices first(int count) const {
    check_count(count);
    const Devices some = of_first_type(gpus_);
    if (some.empty()) return Devices(count, cpu());
    if (count > static_cast<int>(some.size())) {
      const std::string number = std::to_string(count);
      throw error(gpus_there() + "; use \"" + number + "xcpu\" for CPU ranks or \"" + number + "x" + some[0].str() +
                  "\" for ranks that share one GPU");
    }
    return {some.begin(), some.begin() + count};
  }

  // Reads "cpu", "cuda", "cuda:1", or one of them after "Nx".
  void append_item(std::string_view item, Devices& devices) const {
    if (item.empty()) throw error("a device between or beside the commas is missing; use " + std::string(forms));
    const size_t x = item.find('x');
    const auto count = x == std::string_view::npos ? std::nullopt : to_number(trim(item.substr(0, x)));
    const std::string_view name = count ? trim(item.substr(x + 1)) : item;
    const int copies = count.value_or(1);
    check_count(copies);

    if (const auto type = type_named(name)) {
      if (count) {
        throw error("\"" + std::string(item) + "\" could mean two things: use a number for the first GPUs, or " +
                    std::to_string(copies) + "x" + std::string(name) + ":0 for ranks that share one");
      }
      const Devices some = of_type(*type, gpus_);
      if (some.empty()) throw error(std::string(name) + " is not there: " + gpus_there());
      devices.insert(devices.end(), some.begin(), some.end());
    } else {
      devices.insert(devices.end(), copies, one_device(name));
    }
    check_count(static_cast<int>(devices.size()));
  }

  c10::Device one_device(std::string_view name) const {
    if (name == "cpu") return cpu();
    const size_t colon = std::min(name.find(':'), name.size());
    const auto type = type_named(name.substr(0, colon));
    const auto index = type ? to_number(name.substr(colon + 1)) : std::nullopt;
    if (!index) throw error("\"" + std::string(name) + "\" is no device; use " + std::string(forms));
    const Devices some = of_type(*type, gpus_);
    if (*index >= static_cast<int>(some.size())) throw error(std::string(name) + " is not there: " + gpus_there());
    return some[*index];
  }

  void check_count(int count) const {
    if (count < 1) throw error("a run needs at least one device");
    if (count > max_ranks) throw error("more than " + std::to_string(max_ranks) + " ranks are not supported");
  }

  std::string gpus_there() const {
    if (gpus_.empty()) {
      return "LibTorch finds no GPU here, which takes a LibTorch that was built for its type, and its driver; use "
             "\"2xcpu\" for two CPU ranks";
    }
    return "the GPUs of this machine are " + to_string(gpus_);
  }

  Error error(const std::string& reason) const {
    return Error("devices \"" + std::string(spec_) + "\": " + reason, {.options = {"devices"}});
  }

  std::string_view spec_;
  const Devices& gpus_;
};

}  // namespace

Devices gpus() {
  Devices all;
  for (int number = 0; number < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++number) {
    const Devices some = gpus_of(static_cast<c10::DeviceType>(number));
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

Devices default_devices() {
  const Devices some = of_first_type(gpus());
  return some.empty() ? Devices(cpu_cores(), cpu()) : some;
}

Devices parse_devices(std::string_view spec) {
  return parse_devices(spec, gpus());
}

Devices parse_devices(std::string_view spec, const Devices& gpus) {
  return Parser(spec, gpus).parse();
}

std::string to_string(const Devices& devices) {
  Classic<std::ostringstream> text;
  text << "[";
  for (size_t i = 0; i < devices.size(); ++i) text << (i == 0 ? "" : ", ") << devices[i];
  text << "]";
  return text.str();
}

void check_devices(const Devices& devices) {
  if (devices.empty())
    throw Error("the device list is empty; name at least one device, for example cpu", {.options = {"devices"}});
  for (const auto& device : devices) {
    if (device.type() != devices[0].type()) {
      throw Error(to_string(devices) + " mixes device types; the ranks of one run exchange tensors of one type",
                  {.options = {"devices"}});
    }
    const Devices there = gpus_of(device.type());
    if (!device.is_cpu() && std::find(there.begin(), there.end(), device) == there.end()) {
      const Devices all = gpus();
      throw Error("there is no device " + device.str() + "; LibTorch finds the CPU here, and " +
                      (all.empty() ? "no GPU" : to_string(all)),
                  {.options = {"devices"}});
    }
  }
}

bool share_a_gpu(const Devices& devices) {
  std::set<c10::DeviceIndex> indices;
  for (const auto& device : devices) indices.insert(device.index());
  return !devices[0].is_cpu() && indices.size() < devices.size();
}

void synchronize(const c10::Device& device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

int cpu_cores() {
  const int cores = physical_cores(affinity_cpus());
  return std::max(1, static_cast<int>(std::min<double>(cores, std::floor(cpu_quota()))));
}

GpuInfo gpu_info(const c10::Device& device) {
  if (device.is_cpu()) throw Error("gpu_info: " + device.str() + " is no GPU");
  check_devices({device});
  GpuInfo info{device, device.is_cuda() ? gpu_name(device.index()) : ""};
  try {
    if (auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()))) {
      const auto [free_bytes, total_bytes] = allocator->getMemoryInfo(device.index());
      info.free_bytes = static_cast<int64_t>(free_bytes);
      info.total_bytes = static_cast<int64_t>(total_bytes);
    }
  } catch (const c10::NotImplementedError&) {
    info.total_bytes = 0;  // the allocator of this type cannot tell
  } catch (const c10::Error& error) {
    std::throw_with_nested(
        Error("cannot ask " + device.str() + " for its memory: " + error.what_without_backtrace(), {Error::machine}));
  }
  return info;
}

}  // namespace lockstep
