// micro_kernel: multiplies float32 matrices on this thread by oneDNN's micro-kernel, which LibTorch's attention has.
//
// The micro-kernel reads matrices where they lie. A caller may change a tile of the product while the tile is in the
// caches. Thread-safe. Cost: a kernel is compiled for each new shape, once per thread.
#pragma once

#include <cstdint>

namespace lockstep {

// Gives how many features a layer may have at most, in or out, to multiply by the micro-kernel: 0 if LibTorch has none
// on this CPU, or if LibTorch's own products are much faster. A measurement of some 20 ms decides, which the cache
// folder keeps for later processes; without such a folder it is 1,024 (docs/decisions/0080). ATEN_CPU_CAPABILITY=avx2
// turns the micro-kernel off for a process.
int64_t most_micro_kernel_features();

inline bool has_micro_kernel() {
  return most_micro_kernel_features() > 0;
}

// Tells whether this CPU has AMX, which multiplies many rows fastest, and this process may use it
// (models/kernels/amx.hpp). Take it for layers only where has_micro_kernel() too, which multiplies few rows. With AMX
// nothing is measured, and layers have 1,024 features at most. ONEDNN_MAX_CPU_ISA=AVX512_CORE turns AMX off. The answer
// stays as it was at the first call, while oneDNN may have been turned off.
bool has_amx();

// Sets c = a * b, or adds: c += a * b, where each value of the product is summed up before it is added. `row_of_a` is
// the distance between two rows of a, in values. Call it only if has_micro_kernel().
//   a  [rows, depth]
//   b  [depth, columns]
//   c  [rows, columns]
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_of_a, const float* b,
              int64_t row_of_b, float* c, int64_t row_of_c, bool adds);

}  // namespace lockstep
