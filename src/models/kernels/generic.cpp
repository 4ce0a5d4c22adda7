#include <cstdint>

namespace lockstep::kernels {
namespace {

// SSE2 has 16 registers, Neon 32; small tiles suit both.
constexpr int64_t kLanes = 4;
constexpr int64_t kRows = 2;
constexpr int64_t kWeightRows = 2;

}  // namespace
}  // namespace lockstep::kernels

#include "attention_kernels.inc"
#include "batch_norm_relu_kernels.inc"
#include "conv_relu_pool_kernels.inc"
#include "kernels.hpp"
#include "matrices_kernels.inc"

namespace lockstep::kernels {

extern constinit const Kernels generic = {kAttention, kConvReluPool, kBatchNormRelu, kMatrices, nullptr, nullptr};

}  // namespace lockstep::kernels
