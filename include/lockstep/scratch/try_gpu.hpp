// try_gpu: finds a GPU or takes the CPU, by the book's functions (Dive into Deep Learning, section "GPUs").
//
// Thread-safe. Cost: a query of the driver.
#pragma once

#include <lockstep/devices/devices.hpp>

namespace lockstep {

// Gives the GPU with index `i` if the machine has it, otherwise the CPU.
// Source: Dive into Deep Learning, section "GPUs", `try_gpu`; used by "Training on Multiple GPUs" for its device list.
c10::Device try_gpu(int i = 0);

// Lists try_gpu(0) … try_gpu(count - 1) if the machine has `count` GPUs, otherwise `count` CPU ranks. So all entries
// have one device type. Throws Error unless count >= 1.
Devices try_gpus(int count);

// Lists every GPU of the machine, all of one type; the CPU alone if there is none (d2l: `try_all_gpus`).
Devices try_all_gpus();

}  // namespace lockstep
