// GpuMath: while it lives, sets how GPUs compute products and convolutions. LibTorch has one such setting for the whole
// process. The destructor restores the old setting.
#pragma once

namespace lockstep {

struct GpuMathOptions {
  bool tf32 = false;  // products and convolutions round float32 factors to 10 bits of mantissa, for tensor cores
  bool fixed_shapes = false;  // cuDNN tries its algorithms on each new shape and keeps the fastest
  bool reproducible = false;  // cuDNN takes only algorithms that give the same bits each time, without trials
};

class GpuMath {
 public:
  explicit GpuMath(const GpuMathOptions& options);
  ~GpuMath();
  GpuMath(const GpuMath&) = delete;
  GpuMath& operator=(const GpuMath&) = delete;

 private:
  const bool products_before_, convolutions_before_, benchmark_before_, reproducible_before_;
};

}  // namespace lockstep
