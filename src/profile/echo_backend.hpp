// EchoBackend has the collectives of a group in which only this rank exists, to measure one rank's slices of a net.
//
// It counts the rank's exchanges, and answers with the rank's own values. A sum is the rank's own input; the others'
// slices are copies of the rank's. Use it on the rank's thread.
#pragma once

#include <lockstep/plan/model_profile.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class EchoBackend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;

  // Gives the exchanges since the last call, each with the bytes of the whole tensor. A reduce_scatter costs as much as
  // an allgather of the same tensor, and counts as one.
  std::vector<LayerMessage> take_messages() { return std::exchange(messages_, {}); }
  double seconds() const { return seconds_; }  // gives the seconds spent in answers so far

  using Work = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "echo"; }
  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override;
  Work allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::AllgatherOptions&) override;
  Work reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                      const c10d::ReduceScatterOptions&) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override;
  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) override;
  Work barrier(const c10d::BarrierOptions&) override;

 private:
  std::vector<LayerMessage> messages_;
  double seconds_ = 0;
};

}  // namespace lockstep
