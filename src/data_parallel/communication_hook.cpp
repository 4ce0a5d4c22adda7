#include <lockstep/data_parallel/communication_hook.hpp>

namespace lockstep {

c10::intrusive_ptr<c10d::Work> CommunicationHook::post_allreduce(Rank& rank, at::Tensor tensor, c10d::ReduceOp op) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  return rank.backend().allreduce(tensors, options);
}

}  // namespace lockstep
