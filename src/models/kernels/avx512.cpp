#include <cstdint>

namespace lockstep::kernels {
namespace {

// AVX-512 has 32 registers.
constexpr int64_t kLanes = 16;
constexpr int64_t kRows = 5;
constexpr int64_t kWeightRows = 3;
constexpr int64_t kTileRows = 8;

}  // namespace
}  // namespace lockstep::kernels

#include "amx_kernels.inc"
#include "attention_kernels.inc"
#include "batch_norm_relu_kernels.inc"
#include "conv_relu_pool_kernels.inc"
#include "kernels.hpp"
#include "matrices_kernels.inc"
#include "winograd_kernels.inc"

namespace lockstep::kernels {

extern constinit const Kernels avx512 = {kAttention, kConvReluPool, kBatchNormRelu, kMatrices, &kWinograd, &kAmx};

}  // namespace lockstep::kernels
