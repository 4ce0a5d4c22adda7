// on_each_device: one worker per device, all at the same time.
//
// The section's loops over devices read serially and rely on the framework to run asynchronously. Here each
// iteration of such a loop runs on a thread of its own. Cost: starting and joining one thread per device
// (some 20 to 50 us each), which a training step of milliseconds does not notice. Thread-safe; calls may nest.
#pragma once

#include <lockstep/devices.hpp>

#include <cstddef>
#include <functional>

namespace lockstep {

// Calls work(i) for every i < devices.size(), each on its own thread with devices[i] as its current device and one
// intra-op thread, and waits for all of them. If some throw, the exception of the lowest index is rethrown
// as an Error that names the index and the device. A list with one entry runs on a thread as well: no special case.
void on_each_device(const Devices& devices, const std::function<void(size_t)>& work);

}  // namespace lockstep
