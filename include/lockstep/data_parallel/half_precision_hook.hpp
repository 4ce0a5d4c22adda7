// HalfPrecisionHook: gradients travel in bfloat16 or float16, half of float32's bytes.
//
//   lockstep::DataParallel net(MyNet(), rank, {.hook = std::make_shared<lockstep::HalfPrecisionHook>(at::kBFloat16)});
//
// Each rank divides its gradients by the number of ranks in their own precision, rounds them to `type`, and c10d's
// allreduce adds them in that type: every addition rounds (bfloat16: 8 bits, float16: 11 bits), in the order of the
// ranks between threads of one process, in the backend's between processes and GPUs. All ranks have the same bits.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>

namespace lockstep {

// bfloat16 has float32's range. float16 has more digits and less range: what is divided first does not overflow in the
// sum while the mean of the ranks' magnitudes is below 65504, but a rank's own value above 65504 * ranks becomes
// infinite, and so does the average; below 6e-8 * ranks a value becomes zero. Buckets of a type that is as small
// already are averaged as they are; complex ones are an Error. In process, Gloo and NCCL all add both types.
class HalfPrecisionHook : public CommunicationHook {
 public:
  // Throws Error: a type other than at::kBFloat16 and at::kHalf.
  explicit HalfPrecisionHook(at::ScalarType type);

  HookRound average(const GradientBucket& bucket, Rank& rank) override;

 private:
  const at::ScalarType type_;
};

}  // namespace lockstep
