// GpuMath: sets, while it lives, how GPUs compute float32 products: with TF32 or not, and with the fastest of cuDNN's
// convolutions. LibTorch has one such setting for the whole process. The destructor restores the old one.
#pragma once

namespace lockstep {

class GpuMath {
 public:
  // `tf32`: products and convolutions round their factors to 10 bits of mantissa and add in float32, on tensor cores.
  // `fixed_shapes`: cuDNN tries its algorithms on each new shape and keeps the fastest.
  GpuMath(bool tf32, bool fixed_shapes);
  ~GpuMath();
  GpuMath(const GpuMath&) = delete;
  GpuMath& operator=(const GpuMath&) = delete;

 private:
  const bool products_before_, convolutions_before_, benchmark_before_;
};

}  // namespace lockstep
