// try_gpu(), try_gpus() and try_all_gpus(): the GPUs that are there, otherwise the CPU.
#include <gmock/gmock.h>
#include <lockstep/scratch/try_gpu.hpp>

#include <algorithm>
#include <cstddef>

#include "support/error_of.hpp"

namespace lockstep {
namespace try_gpu_test {

const c10::Device cpu(c10::kCPU);

TEST(TryGpu, FallsBackToTheCpu) {
  const int count = static_cast<int>(gpus().size());
  EXPECT_EQ(try_gpu(count), cpu);
  EXPECT_EQ(try_gpu(-1), cpu);
  EXPECT_EQ(try_gpu(1 << 20), cpu);
  for (int i = 0; i < count; ++i) EXPECT_EQ(try_gpu(i), c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(i)));
  EXPECT_EQ(try_all_gpus().size(), static_cast<size_t>(std::max(count, 1)));
  EXPECT_EQ(try_all_gpus()[0], try_gpu(0));
}

TEST(TryGpu, GivesOneTypeOfDevice) {
  const int count = static_cast<int>(gpus().size());
  EXPECT_EQ(try_gpus(count + 1), Devices(count + 1, cpu));
  EXPECT_EQ(try_gpus(count + 2), Devices(count + 2, cpu));
  if (count > 0) EXPECT_EQ(try_gpus(count), try_all_gpus());
  EXPECT_THAT(error_of([] { try_gpus(0); }), Refused());
}

}  // namespace try_gpu_test
}  // namespace lockstep
