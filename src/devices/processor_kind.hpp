// processor_kind: names the arithmetic that a device computes by. On two devices of one kind the same program gives the
// same bits. LibTorch, oneDNN, MKL and the C library choose their kernels by the processor, and by variables of the
// environment, such as ATEN_CPU_CAPABILITY.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace lockstep {

// Gives the device's kind. That of a CPU has LibTorch's choice of instructions, and a hash of the results of small
// products, convolutions, sums and updates. By what linear layers multiply follows, and whether denormal numbers are 0:
// "AVX512 1a2b3c4d, products by oneDNN up to 1024 features, denormal numbers as 0", or "products by AMX". The process
// computes it once, on one thread, in 2 ms and the time that the libraries need before a first product. The kind of a
// GPU is the driver's name and the compute capability, or "" for other types than cuda and without CUDA parts.
std::string processor_kind(const c10::Device& device);

}  // namespace lockstep
