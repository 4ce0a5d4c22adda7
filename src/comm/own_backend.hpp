// OwnBackend is the base of lockstep's two c10d backends. It refuses the calls of c10d that neither offers, with an
// Error that says what to do instead.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "arguments.hpp"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

class OwnBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "lockstep"; }

  void setTimeout(std::chrono::milliseconds) override {
    refuse("setTimeout", "RunOptions::timeout is that of all calls, and a call's options or wait() can have their own");
  }
  void abort() override { refuse("abort", "throw in the function that run() calls, which ends all ranks"); }
  void shutdown() override { refuse("shutdown", "return from the function that run() calls"); }

  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override {
    refuse("gather", "take allgather");
  }
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override {
    refuse("scatter", "take alltoall, or broadcast all of it");
  }
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    refuse("allreduce_sparse", "take allreduce of dense tensors");
  }
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override {
    refuse("allreduce_coalesced", kOneByOne);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override {
    refuse("allgather_coalesced", kOneByOne);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override {
    refuse("allgather_into_tensor_coalesced", kOneByOne);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override {
    refuse("reduce_scatter_tensor_coalesced", kOneByOne);
  }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {
    refuse("monitoredBarrier", "take barrier, whose Error names who is missing");
  }

 protected:
  OwnBackend(int rank, int size, Arguments arguments) : Backend(rank, size), arguments_(std::move(arguments)) {}

  const Arguments arguments_;

 private:
  static constexpr const char* kOneByOne = "make a call for each tensor";

  [[noreturn]] void refuse(const std::string& call, const std::string& instead) const {
    arguments_.refuse("lockstep's backend does not offer c10d's " + call + "; " + instead);
  }
};

}  // namespace lockstep::comm
