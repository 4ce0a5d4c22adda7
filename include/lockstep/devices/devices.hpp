// Devices: finds the machine's devices, and reads how a user names them.
//
// A device list has one entry per rank. A device may be in it several times: two CPU ranks, or two ranks that share one
// GPU. A GPU is any accelerator that LibTorch can use here, under LibTorch's name: `cuda` is NVIDIA's and AMD's, `xpu`
// Intel's, `mps` Apple's. Thread-safe: nothing here keeps state. Cost: a query of the driver.
#pragma once

#include <c10/core/Device.h>

#include <string_view>
#include <vector>

namespace lockstep {

using Devices = std::vector<c10::Device>;

// Lists every GPU that LibTorch can use, in the order of types and indices. device_info.hpp says more of each.
Devices gpus();

// Lists every GPU of the machine, or else one CPU rank per core. A run that names no devices uses these.
Devices default_devices();

// Lists the devices that `spec` names, one entry per rank:
//   "2"              the first two GPUs, or two CPU ranks on a machine without one
//   "cpu"            one CPU rank             "cuda"            every GPU
//   "cpu,cpu"        two CPU ranks            "cuda:0,cuda:1"   these two GPUs
//   "2xcpu"          two CPU ranks            "2xcuda:0"        two ranks that share one GPU
// Other types of GPU are written alike ("xpu", "mps:0"). If LibTorch finds several types, a number means the first
// type. Blanks around a name or a number do not matter. Section: "Training", the list `devices = [d2l.try_gpu(i) for i
// in range(num_gpus)]`, as a user writes it. Throws Error for empty or unreadable text, for a GPU that is not there
// (the text lists the GPUs that are), for no device or more than 1024, and for two types in one list: ranks of one run
// exchange tensors of one device type.
Devices parse_devices(std::string_view spec);

// Reads `spec` for a machine with these GPUs. Give them in the order of types and indices.
Devices parse_devices(std::string_view spec, const Devices& gpus);

// Waits until everything queued on `device` is done, so that a clock can measure the device's work. On the CPU there is
// nothing to wait for. Do not call this in a rank that shares a GPU over NCCL with others of the process, whose work
// there may wait for this rank's next call.
void synchronize(const c10::Device& device);

// Counts the CPU cores that this process may use: physical cores within its affinity mask and CPU quota, at least 1.
int cpu_cores();

}  // namespace lockstep
