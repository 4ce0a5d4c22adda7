// processor_kind: by which arithmetic a device computes. On two of one kind the same program gives the same bits.
// LibTorch, oneDNN, MKL and the C library choose their kernels by the processor, and by variables of the environment,
// such as ATEN_CPU_CAPABILITY.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace lockstep {

// Of the CPU: LibTorch's choice of instructions, and a hash of what small products, convolutions, sums and updates
// give, such as "AVX512 1a2b3c4d". It is computed once per process, on one thread, in 2 ms and what the libraries take
// before their first product.
// Of a GPU: the driver's name and the compute capability. Empty for other types than cuda, and without CUDA parts.
std::string processor_kind(const c10::Device& device);

}  // namespace lockstep
