// on_each_device: runs one worker per device, all at the same time.
//
// The section's loops over devices read serially and rely on the framework to run asynchronously. Here each
// iteration of such a loop runs on a thread of its own. Cost: starting and joining one thread per device
// (some 20 to 50 us each), which a training step of milliseconds does not notice. Thread-safe; calls may nest.
#pragma once

#include <lockstep/devices/devices.hpp>

#include <cstddef>
#include <functional>

namespace lockstep {

// Calls work(i) for every i < devices.size(), and waits for all calls. Each has a thread of its own, with devices[i] as
// the current device and one intra-op thread. A list with one entry runs on a thread as well.
//
// A worker takes over its caller's modes (NoGradGuard, InferenceMode, autocast). For GPUs it also takes over the
// caller's current stream of every device in the list. So GPU work is queued exactly where a plain loop would queue it.
// The caller needs no synchronisation before and after the call, and the call does not wait for the GPUs.
//
// If some throw, the others still finish. Then the exception of the lowest index is rethrown as an Error that names the
// index and the device, with the original nested inside. Throws Error, before any work, if a device is not there.
void on_each_device(const Devices& devices, const std::function<void(size_t)>& work);

}  // namespace lockstep
