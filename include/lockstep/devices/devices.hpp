// Devices: finds the machine's devices, and reads how a user names them.
//
// A device list has one entry per rank. A device may be in it several times: two CPU ranks, or two ranks that share one
// GPU. A GPU is any accelerator that LibTorch can use here, under LibTorch's name: `cuda` is NVIDIA's and AMD's, `xpu`
// Intel's, `mps` Apple's. Thread-safe: nothing here keeps state. Cost: a query of the driver.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

using Devices = std::vector<c10::Device>;

// The GPU with index `i` if the machine has it, otherwise the CPU.
// Source: Dive into Deep Learning, section "GPUs", `try_gpu`; used by "Training on Multiple GPUs" for its device list.
c10::Device try_gpu(int i = 0);

// try_gpu(0) … try_gpu(count - 1) if the machine has `count` GPUs, otherwise `count` CPU ranks. So all entries have one
// device type. Throws Error unless count >= 1.
Devices try_gpus(int count);

// Every GPU of the machine, all of one type; the CPU alone if there is none (d2l: `try_all_gpus`).
Devices try_all_gpus();

// Every GPU of the machine, or else one CPU rank per core. A run that names no devices uses these.
Devices default_devices();

// The devices that `spec` names, one entry per rank:
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

// Reads `spec` for a machine with these GPUs, which must be in the order of their types and indices.
Devices parse_devices(std::string_view spec, const Devices& gpus);

// Writes the list as the section prints it: "[cpu, cpu]", "[cuda:0]".
std::string to_string(const Devices& devices);

// Throws Error unless a run could have one rank per entry: there is an entry, and all devices exist and have one type.
void check_devices(const Devices& devices);

// Waits until everything queued on `device` is done, so that a clock can measure a device's work. On the CPU there is
// nothing to wait for.
void synchronize(const c10::Device& device);

// Number of GPUs that LibTorch can use, of the first type that it finds; 0 if this LibTorch or this machine has none.
int gpu_count();

// CPU cores that this process may use: physical cores within its affinity mask and its cgroup's CPU quota, at least 1.
int cpu_cores();

struct GpuInfo {
  c10::Device device;
  std::string name;         // the driver's name; empty for other types than cuda, and without CUDA parts
  int64_t free_bytes = 0;   // the bytes of its memory that are free now; others may use the rest
  int64_t total_bytes = 0;  // the bytes of its memory; 0 where LibTorch cannot tell for this type
};

// Asks what a GPU is. From then on this process uses the GPU: CUDA keeps some hundred MB of its memory. Throws Error,
// which names the GPU, if it is not there, is no GPU, or does not answer.
GpuInfo gpu_info(const c10::Device& gpu);

// One entry per GPU that LibTorch can use, in the order of types and indices; empty without GPUs. Names come from the
// CUDA runtime, memory from LibTorch's allocator. Throws Error, which names the GPU, if one does not answer.
std::vector<GpuInfo> gpus();

}  // namespace lockstep
