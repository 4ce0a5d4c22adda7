// Kernels: holds all kernels of this folder, compiled for one instruction set.
#pragma once

#include "amx.hpp"
#include "attention.hpp"
#include "batch_norm_relu.hpp"
#include "conv_relu_pool.hpp"
#include "matrices.hpp"
#include "winograd.hpp"

namespace lockstep::kernels {

// This struct has no member functions: see conv_relu_pool.hpp.
struct Kernels {
  AttentionKernels attention;
  ConvReluPoolKernels conv_relu_pool;
  BatchNormReluKernels batch_norm_relu;
  MatrixKernels matrices;
  const WinogradKernels* winograd;  // null without AVX2, where nobody has measured them
  const AmxKernels* amx;            // null without AVX-512. Ask has_amx() too (devices/micro_kernel.hpp)
};

// Gives the kernels for the instructions that LibTorch uses here (ATEN_CPU_CAPABILITY=avx2 or =default restricts both).
const Kernels& of_this_cpu();

}  // namespace lockstep::kernels
