// GpuMath: LibTorch's settings change for its life only.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "devices/gpu_math.hpp"

namespace gpu_math_test {

TEST(GpuMath, SetsWhatIsAskedForAndPutsBackWhatWas) {
  const auto& context = at::globalContext();
  const bool products = context.allowTF32CuBLAS(), convolutions = context.allowTF32CuDNN();
  const bool benchmark = context.benchmarkCuDNN(), deterministic = context.deterministicCuDNN();
  at::globalContext().setAllowTF32CuDNN(true);
  {
    const lockstep::GpuMath math({.tf32 = true});
    EXPECT_TRUE(context.allowTF32CuBLAS());
    EXPECT_TRUE(context.allowTF32CuDNN());
    lockstep::search_algorithms(true);
    EXPECT_TRUE(context.benchmarkCuDNN());
  }
  EXPECT_EQ(context.allowTF32CuBLAS(), products);
  EXPECT_TRUE(context.allowTF32CuDNN());
  EXPECT_EQ(context.benchmarkCuDNN(), benchmark);
  EXPECT_EQ(context.deterministicCuDNN(), deterministic);
  {
    const lockstep::GpuMath math({});
    EXPECT_FALSE(context.allowTF32CuBLAS());
    EXPECT_FALSE(context.allowTF32CuDNN());  // float32 is float32
  }
  at::globalContext().setBenchmarkCuDNN(true);
  {
    const lockstep::GpuMath math({.reproducible = true});
    EXPECT_TRUE(context.deterministicCuDNN());
    EXPECT_FALSE(context.benchmarkCuDNN());
  }
  EXPECT_TRUE(context.benchmarkCuDNN());
  at::globalContext().setBenchmarkCuDNN(benchmark);
  at::globalContext().setAllowTF32CuDNN(convolutions);
}

}  // namespace gpu_math_test
