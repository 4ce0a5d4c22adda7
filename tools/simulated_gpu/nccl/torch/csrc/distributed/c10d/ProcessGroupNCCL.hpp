// A stand-in for c10d's ProcessGroupNCCL on simulated devices, under the same name, so that lockstep's nccl.cpp
// compiles and runs as it is. The ranks are threads and processes that have a store in common.
//
// As NCCL has it: a communicator is made at the first call or by eagerConnectSingleDevice(), where the host waits for
// all members without a limit; a collective is a kernel on the communicator's own stream; messages have no tags;
// tensors must be dense in their memory format; an abort makes kernels end with whatever they have, and waits until no
// graph has any; shutdown() waits for them. A kernel that waits past the timeout has the watchdog abort its
// communicator, or end the process; but the watchdog does not see kernels of graphs.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simulated_gpu/nccl/communicator.hpp"

namespace c10d {

inline int getNcclVersionNumber() {
  return 23007;
}
inline std::string getNcclVersion() {
  return "2.30.7";
}

class ProcessGroupNCCL : public Backend {
 public:
  struct Options : Backend::Options {
    Options() : Backend::Options("nccl") {}
    static c10::intrusive_ptr<Options> create() { return c10::make_intrusive<Options>(); }
    bool is_high_priority_stream = false;
  };

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<Work>;

  ProcessGroupNCCL(c10::intrusive_ptr<Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
      : Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override;
  WorkPtr barrier(const BarrierOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;

  void eagerConnectSingleDevice(at::Device device) override;
  ErrorType getError() override { return error_->load(); }
  void abort() override;
  void shutdown() override;

 private:
  using Meeting = simulated::Communicator::Meeting;
  using DoWork = std::function<void(Meeting&)>;

  struct Connected {
    std::shared_ptr<simulated::Communicator> communicator;
    c10::Stream stream;
    std::shared_ptr<char> kernels = std::make_shared<char>();  // each kernel has it, also those of graphs
  };

  Connected connect(const std::string& key, int rank, int size);
  WorkPtr launch(OpType type, const Connected& connected, const std::string& what, const Tensors& in,
                 const Tensors& out, const DoWork& work);
  WorkPtr collective(OpType type, const std::string& what, const Tensors& in, const Tensors& out, const DoWork& work);
  WorkPtr message(at::Tensor& tensor, int peer, bool sends);

  const c10::intrusive_ptr<Store> store_;
  const c10::intrusive_ptr<Options> options_;
  bool eager_ = false;
  const std::shared_ptr<std::atomic<ErrorType>> error_ = std::make_shared<std::atomic<ErrorType>>(ErrorType::SUCCESS);
  std::mutex mutex_;
  std::map<std::string, Connected> connected_;  // guarded by mutex_
};

}  // namespace c10d
