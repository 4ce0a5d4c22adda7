#include "run_name.hpp"

#include <algorithm>
#include <system_error>

namespace lockstep::cli {

namespace {

std::string name_without_colon(c10::Device device) {
  std::string name = device.str();
  name.erase(std::remove(name.begin(), name.end(), ':'), name.end());
  return name;
}

// Tells whether each index is one above the last, as of cuda:0, cuda:1, cuda:2.
bool is_range(const Devices& devices) {
  const auto gap = std::adjacent_find(devices.begin(), devices.end(), [](c10::Device a, c10::Device b) {
    return !a.has_index() || b.index() != a.index() + 1;
  });
  return devices.size() > 1 && gap == devices.end();
}

}  // namespace

std::string short_name(const Devices& devices) {
  if (is_range(devices)) return name_without_colon(devices.front()) + "-" + std::to_string(devices.back().index());
  std::string name;
  for (auto device = devices.begin(); device != devices.end();) {
    const auto next = std::find_if(device, devices.end(), [&](c10::Device other) { return other != *device; });
    const auto copies = next - device;
    if (!name.empty()) name += '+';
    if (copies > 1) name += std::to_string(copies) + 'x';
    name += name_without_colon(*device);
    device = next;
  }
  return name;
}

std::string new_run_name(const std::filesystem::path& runs_dir, std::time_t now, const std::string& what,
                         const Devices& devices) {
  std::tm local{};
  localtime_r(&now, &local);
  char time[32];
  std::strftime(time, sizeof time, "%Y-%m-%d_%H-%M-%S", &local);
  const std::string first = std::string(time) + "_" + what + "_" + short_name(devices);
  std::string name = first;
  std::error_code unreadable;  // making the run's folder would fail too, and that error says more
  for (int number = 2; std::filesystem::exists(runs_dir / name, unreadable); ++number) {
    name = first + "-" + std::to_string(number);
  }
  return name;
}

}  // namespace lockstep::cli
