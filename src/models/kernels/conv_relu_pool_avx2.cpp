#include <cstdint>

namespace lockstep::kernels {
namespace {

// 16 registers.
constexpr int64_t kLanes = 8;
constexpr int64_t kRows = 2;
constexpr int64_t kWeightRows = 2;

}  // namespace
}  // namespace lockstep::kernels

#include "conv_relu_pool_kernels.inc"

namespace lockstep::kernels {

extern const ConvReluPoolKernels conv_relu_pool_avx2 = kKernels;

}  // namespace lockstep::kernels
