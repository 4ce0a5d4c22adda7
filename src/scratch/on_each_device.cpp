#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/scratch/on_each_device.hpp>
#include <lockstep/scratch/try_gpu.hpp>

#include "base/exception_text.hpp"
#include "base/start_thread.hpp"
#include "devices/device_streams.hpp"

#include <string>
#include <thread>
#include <vector>

namespace lockstep {

namespace {

// Gives the caller's current stream of every device in the list (the CPU has none).
std::vector<c10::Stream> current_streams(const Devices& devices) {
  std::vector<c10::Stream> streams;
  for (const c10::Device& device : devices) {
    if (device.is_cpu()) continue;
    if (!c10::impl::hasDeviceGuardImpl(device.type()) || !device.has_index() ||
        device.index() >= c10::impl::VirtualGuardImpl(device.type()).deviceCount()) {
      throw Error("on_each_device: " + device.str() + " is not there or lacks its index; this machine has " +
                  to_string(try_all_gpus()));
    }
    streams.push_back(current_stream(device));
  }
  return streams;
}

// Holds what a worker takes over from its caller, so that the loop's body acts as in a plain loop.
struct Surroundings {
  at::ThreadLocalState modes;  // NoGradGuard, autocast, …
  std::vector<c10::Stream> streams;
};

void work_on(const c10::Device& device, size_t index, const Surroundings& caller,
             const std::function<void(size_t)>& work) {
  at::set_num_threads(1);
  const at::ThreadLocalStateGuard modes(caller.modes);
  c10::OptionalDeviceGuard current_device;
  if (!device.is_cpu()) current_device.reset_device(device);
  const c10::MultiStreamGuard streams(caller.streams);
  work(index);
}

void rethrow_first(const std::vector<std::exception_ptr>& failures, const Devices& devices) {
  for (size_t i = 0; i < failures.size(); ++i) {
    if (!failures[i]) continue;
    try {
      std::rethrow_exception(failures[i]);
    } catch (...) {
      std::throw_with_nested(
          Error("worker " + std::to_string(i) + " on " + devices[i].str() + ": " + exception_text(failures[i]),
                data_of(failures[i])));
    }
  }
}

}  // namespace

void on_each_device(const Devices& devices, const std::function<void(size_t)>& work) {
  const Surroundings caller{at::ThreadLocalState(), current_streams(devices)};
  const int caller_threads = at::get_num_threads();
  std::vector<std::exception_ptr> failures(devices.size());
  {
    std::vector<std::jthread> workers;  // joined at the end of this block, also when a thread cannot be started
    for (size_t i = 0; i < devices.size(); ++i) {
      try {
        workers.push_back(start_thread<std::jthread>([&, i] {
          try {
            work_on(devices[i], i, caller, work);
          } catch (...) {
            failures[i] = std::current_exception();
          }
        }));
      } catch (const Error&) {
        failures[i] = std::current_exception();
        break;
      }
    }
  }
  // set_num_threads acts on its own thread, and on threads that have not computed yet. This gives such threads the
  // caller's number again.
  at::set_num_threads(caller_threads);
  rethrow_first(failures, devices);
}

}  // namespace lockstep
