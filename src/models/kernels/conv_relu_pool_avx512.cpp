#include <cstdint>

namespace lockstep::kernels {
namespace {

// 32 registers.
constexpr int64_t kLanes = 16;
constexpr int64_t kRows = 5;
constexpr int64_t kWeightRows = 3;

}  // namespace
}  // namespace lockstep::kernels

#include "conv_relu_pool_kernels.inc"

namespace lockstep::kernels {

extern const ConvReluPoolKernels conv_relu_pool_avx512 = kKernels;

}  // namespace lockstep::kernels
