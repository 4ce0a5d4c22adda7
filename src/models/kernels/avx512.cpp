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

#include "batch_norm_relu_kernels.inc"
#include "conv_relu_pool_kernels.inc"
#include "matrices_kernels.inc"
#include "winograd_kernels.inc"

namespace lockstep::kernels {

extern const ConvReluPoolKernels conv_relu_pool_avx512 = kConvReluPool;
extern const BatchNormReluKernels batch_norm_relu_avx512 = kBatchNormRelu;
extern const MatrixKernels matrices_avx512 = kMatrices;
extern const WinogradKernels winograd_avx512 = kWinograd;

}  // namespace lockstep::kernels
