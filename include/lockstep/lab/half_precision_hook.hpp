// HalfPrecisionHook: gradients travel in bfloat16 or float16, half of float32's bytes.
//
//   lockstep::DataParallel net(MyNet(), rank, {.hook = std::make_shared<lockstep::HalfPrecisionHook>(at::kBFloat16)});
//
// Each rank divides its gradients by the number of ranks, in the gradients' precision, and rounds the quotients to
// `type`. c10d's allreduce then adds them in that type, so every addition rounds (bfloat16: 8 bits, float16: 11 bits).
// Threads of one process add in the order of the ranks. Between processes and GPUs the backend's order holds. All ranks
// get the same bits.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>

namespace lockstep {

// bfloat16 has float32's range. float16 has more digits and less range. Because ranks divide first, a sum does not
// overflow while the mean of the ranks' magnitudes is below 65504. But a rank's own value above 65504 * ranks becomes
// infinite, and so does the average. A value below 6e-8 * ranks becomes zero. Buckets whose type is as small already
// are averaged as they are. Complex buckets are an Error. lockstep's own backend, Gloo and NCCL add both types.
class HalfPrecisionHook : public CommunicationHook {
 public:
  // Throws Error for a type other than at::kBFloat16 and at::kHalf.
  explicit HalfPrecisionHook(at::ScalarType type);

  CommunicationHook::Round average(const GradientBucket& bucket, Rank& rank) override;

 private:
  const at::ScalarType type_;
};

}  // namespace lockstep
