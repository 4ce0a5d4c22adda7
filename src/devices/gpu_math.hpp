// GpuMath: while it lives, sets how GPUs compute products and convolutions. LibTorch has one such setting for the whole
// process. The destructor restores the old setting.
#pragma once

namespace lockstep {

struct GpuMathOptions {
  // Products and convolutions round float32 factors to 10 bits of mantissa, for tensor cores. LibTorch by default lets
  // convolutions do so; here float32 is float32.
  bool tf32 = false;
  bool reproducible = false;  // cuDNN takes only algorithms that give the same bits each time, without trials
};

class GpuMath {
 public:
  explicit GpuMath(const GpuMathOptions& options);
  ~GpuMath();
  GpuMath& operator=(GpuMath&&) = delete;

 private:
  const bool products_before_, convolutions_before_, benchmark_before_, reproducible_before_;
};

// Lets cuDNN try its algorithms on each new shape of a convolution, and keep the fastest, or not. A trial takes a
// second for a large network. So do it for shapes that stay. GpuMath restores the old setting.
void search_algorithms(bool on);

}  // namespace lockstep
