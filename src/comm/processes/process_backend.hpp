// A ProcessBackend is lockstep's c10d backend of one CPU rank of a run in several processes, over c10d's Gloo.
//
// It offers what the in-process backend offers: every reduction, every type, tensors that are not contiguous.
// Collectives that Gloo lacks are made of Gloo's own. All waits go through the Monitor. Use it from the rank's own
// thread.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/group_member.hpp"
#include "comm/members.hpp"
#include "comm/own_backend.hpp"
#include "gloo_reduction.hpp"
#include "monitor.hpp"
#include "process_work.hpp"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

// Messages with this tag or a higher one can be received from any rank. The message's number then does not help to
// bring both sides together (see process_backend.cpp), so fewer sides that differ are found.
constexpr int kFirstOpenTag = 0x4000;

class ProcessBackend : public OwnBackend {
 public:
  // Makes the backend of rank `world_rank` among `members`. `group` has one member for each of these ranks, and `store`
  // is a connection of the rank's own. `open` notes the backend's works that nobody has waited for yet.
  ProcessBackend(int world_rank, Members members, GroupMember group, StorePtr store, std::shared_ptr<Monitor> monitor,
                 std::shared_ptr<OpenWorks> open, std::chrono::milliseconds timeout);

  using Tensor = at::Tensor;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;  // takes tags from kFirstOpenTag on
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  using Start = std::function<Pending()>;

  // Starts a call and gives its handle. A `timeout` <= 0 means the run's.
  WorkPtr post(c10d::OpType type, const std::string& text, std::chrono::milliseconds timeout, Tensors result,
               const Start& start);
  WorkPtr post_call(c10d::OpType type, OpenCall call, std::chrono::milliseconds timeout, Tensors result,
                    const Start& start);

  c10d::ReduceOp::RedOpType checked_op(const c10d::ReduceOp& asked, const Tensor& tensor,
                                       const std::string& operation) const;

  // Throws Error if a rank of this process gave memory of `changed` to the same call. Use it for the newest call.
  void refuse_shared_memory(const Tensor& changed, const std::string& text) const;

  struct Message {
    OpenCall call;
    int tag;  // the tag that Gloo gets
  };
  void check_tag(int tag) const;
  Message message_of(const Tensor& tensor, int source, int destination, int tag);

  // Sends `inputs[r]` to rank r and receives `outputs[r]` from it; then calls finish().
  Pending exchange(const Tensors& inputs, const Tensors& outputs, std::function<void()> finish) const;
  // Compares an alltoall's parts with the other ranks', unless all know them (AgreedParts). Gives a function to call
  // once all parts have come. Throws Error if two parts do not fit.
  std::function<void()> compare(const Tensors& inputs, const Tensors& outputs) const;
  WorkPtr gather_all(c10d::OpType type, const Tensor& input, const Tensors& outputs, Tensors result,
                     const c10d::AllgatherOptions& options);
  WorkPtr scatter_reduced(c10d::OpType type, const Tensors& inputs, const Tensor& output,
                          const c10d::ReduceScatterOptions& options);

  const int world_rank_;
  const Members members_;
  const GroupMember group_;
  const StorePtr store_;
  const std::shared_ptr<Monitor> monitor_;
  const std::shared_ptr<OpenWorks> open_;
  const std::chrono::milliseconds timeout_;
  int64_t collective_calls_ = 0;
  std::map<std::pair<int, int>, int64_t> sent_, received_;  // messages, by the other rank and the tag
};

}  // namespace lockstep::comm
