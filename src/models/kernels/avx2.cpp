#include <cstdint>

namespace lockstep::kernels {
namespace {

// AVX2 has 16 registers.
constexpr int64_t kLanes = 8;
constexpr int64_t kRows = 2;
constexpr int64_t kWeightRows = 2;
constexpr int64_t kTileRows = 4;

}  // namespace
}  // namespace lockstep::kernels

#include "attention_kernels.inc"
#include "batch_norm_relu_kernels.inc"
#include "conv_relu_pool_kernels.inc"
#include "kernels.hpp"
#include "matrices_kernels.inc"
#include "winograd_kernels.inc"

namespace lockstep::kernels {

extern constinit const Kernels avx2 = {kAttention, kConvReluPool, kBatchNormRelu, kMatrices, &kWinograd, nullptr};

}  // namespace lockstep::kernels
