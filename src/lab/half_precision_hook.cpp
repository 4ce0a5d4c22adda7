#include <c10/core/ScalarTypeToTypeMeta.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/half_precision_hook.hpp>

namespace lockstep {

HalfPrecisionHook::HalfPrecisionHook(at::ScalarType type) : type_(type) {
  if (type == at::kBFloat16 || type == at::kHalf) return;
  throw Error(std::string("HalfPrecisionHook: the type is ") + c10::toString(type) + "; it must be BFloat16 or Half");
}

CommunicationHook::Round HalfPrecisionHook::average(const GradientBucket& bucket, Rank& rank) {
  if (bucket.flat.element_size() <= static_cast<int64_t>(c10::elementSize(type_))) {
    return {.work = CommunicationHook::post_allreduce(rank, bucket.flat, c10d::ReduceOp::AVG)};
  }
  if (bucket.flat.is_complex()) {
    throw Error(rank.name() + ": HalfPrecisionHook: " + bucket.names[0] +
                " is complex, of which 16 bits would keep the "
                "real part alone; use no hook, or real parameters");
  }
  const at::Tensor rounded = bucket.flat.div(rank.world_size()).to(type_);
  return {.work = CommunicationHook::post_allreduce(rank, rounded),
          .finish = [flat = bucket.flat, rounded] { flat.copy_(rounded); }};
}

}  // namespace lockstep
