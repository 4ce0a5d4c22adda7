#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "simulated_gpu/device/guard.hpp"
#include "simulated_gpu/device/launch.hpp"
#include "simulated_gpu/device/reports.hpp"
#include "simulated_gpu/nccl/kernel_work.hpp"

namespace c10d {
namespace {

using simulated::Communicator;
using simulated::Use;
using simulated::View;
using Meeting = Communicator::Meeting;
using Tensors = ProcessGroupNCCL::Tensors;
using WorkPtr = ProcessGroupNCCL::WorkPtr;

std::string text(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.numel());
}

void check_dense(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.is_contiguous(tensor.suggest_memory_format())) continue;
    C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
  }
}

at::Tensor reduced(const std::vector<at::Tensor>& values, ReduceOp::RedOpType op) {
  at::Tensor sum = values[0].clone();
  for (size_t rank = 1; rank < values.size(); ++rank) {
    if (op == ReduceOp::MAX) {
      sum = at::maximum(sum, values[rank]);
    } else if (op == ReduceOp::MIN) {
      sum = at::minimum(sum, values[rank]);
    } else if (op == ReduceOp::PRODUCT) {
      sum.mul_(values[rank]);
    } else {
      sum.add_(values[rank]);
    }
  }
  if (op == ReduceOp::AVG) sum.div_(static_cast<double>(values.size()));
  return sum;
}

// The `place`th input of every rank.
Tensors inputs_of(const Meeting& meeting, size_t place) {
  Tensors values;
  for (const auto& of_rank : meeting.in) values.push_back(of_rank[place]);
  return values;
}

// NCCL adds and moves memory as it lies, whatever a tensor's dimensions are.
View memory_of(const at::Tensor& tensor) {
  return View(tensor.detach().as_strided({tensor.numel()}, {1}));
}

// A fault that a test has planted.
void suffer(const std::function<void()>& fault) {
  if (fault) fault();
}

// The mode in which the watchdog does not end the process, see ProcessGroupNCCL's ErrorHandlingMode.
bool watchdog_spares_the_process() {
  const char* const mode = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  return mode != nullptr && std::string(mode) == "2";
}

}  // namespace

// ---- Calls.

WorkPtr ProcessGroupNCCL::allreduce(Tensors& tensors, const AllreduceOptions& options) {
  const ReduceOp::RedOpType op = options.reduceOp;
  return collective(OpType::ALLREDUCE, "allreduce " + text(tensors[0]) + " " + std::to_string(op), tensors, tensors,
                    [op](Meeting& meeting) { meeting.out[0].copy_(reduced(inputs_of(meeting, 0), op)); });
}

WorkPtr ProcessGroupNCCL::broadcast(Tensors& tensors, const BroadcastOptions& options) {
  const auto root = static_cast<size_t>(options.rootRank);
  return collective(OpType::BROADCAST, "broadcast " + text(tensors[0]), tensors, tensors,
                    [root](Meeting& meeting) { meeting.out[0].copy_(meeting.in[root][0]); });
}

WorkPtr ProcessGroupNCCL::reduce(Tensors& tensors, const ReduceOptions& options) {
  const ReduceOp::RedOpType op = options.reduceOp;
  const auto root = options.rootRank;
  return collective(OpType::REDUCE, "reduce " + text(tensors[0]) + " " + std::to_string(op), tensors, tensors,
                    [op, root](Meeting& meeting) {
                      if (meeting.rank == root) meeting.out[0].copy_(reduced(inputs_of(meeting, 0), op));
                    });
}

WorkPtr ProcessGroupNCCL::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions&) {
  return collective(OpType::ALLGATHER, "allgather " + text(inputs[0]), inputs, outputs[0], [](Meeting& meeting) {
    for (size_t i = 0; i < meeting.out.size(); ++i) meeting.out[i].copy_(meeting.in[i][0]);
  });
}

WorkPtr ProcessGroupNCCL::_allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions&) {
  return collective(OpType::_ALLGATHER_BASE, "allgather " + text(input), {input}, {output}, [](Meeting& meeting) {
    Tensors values;
    for (const auto& value : inputs_of(meeting, 0)) values.push_back(value.flatten());
    meeting.out[0].view({-1}).copy_(at::cat(values));
  });
}

WorkPtr ProcessGroupNCCL::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const ReduceScatterOptions& options) {
  const ReduceOp::RedOpType op = options.reduceOp;
  return collective(OpType::REDUCE_SCATTER, "reduce_scatter " + text(outputs[0]), inputs[0], outputs,
                    [op](Meeting& meeting) {
                      meeting.out[0].copy_(reduced(inputs_of(meeting, static_cast<size_t>(meeting.rank)), op));
                    });
}

WorkPtr ProcessGroupNCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const ReduceScatterOptions& options) {
  const ReduceOp::RedOpType op = options.reduceOp;
  return collective(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter " + text(output), {input}, {output},
                    [op](Meeting& meeting) {
                      const at::Tensor& out = meeting.out[0];
                      const at::Tensor sum = reduced(inputs_of(meeting, 0), op).flatten();
                      out.copy_(sum.narrow(0, meeting.rank * out.numel(), out.numel()).view(out.sizes()));
                    });
}

WorkPtr ProcessGroupNCCL::alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions&) {
  return collective(OpType::ALLTOALL, "alltoall", inputs, outputs, [](Meeting& meeting) {
    for (size_t from = 0; from < meeting.in.size(); ++from) {
      meeting.out[from].view({-1}).copy_(meeting.in[from][static_cast<size_t>(meeting.rank)].flatten());
    }
  });
}

WorkPtr ProcessGroupNCCL::barrier(const BarrierOptions&) {
  const c10::OptionalDeviceGuard guard(bound_device_id_);
  const Tensors tensor{at::zeros({1}, at::TensorOptions(*bound_device_id_))};
  return collective(OpType::BARRIER, "barrier", tensor, tensor, [](Meeting&) {});
}

WorkPtr ProcessGroupNCCL::send(Tensors& tensors, int destination, int) {
  return message(tensors[0], destination, /*sends=*/true);
}

WorkPtr ProcessGroupNCCL::recv(Tensors& tensors, int source, int) {
  return message(tensors[0], source, /*sends=*/false);
}

// ---- The communicators.

void ProcessGroupNCCL::eagerConnectSingleDevice(at::Device device) {
  bound_device_id_ = device;
  eager_ = true;
  suffer(simulated::faults().in_init);
  connect("all", rank_, size_);
}

void ProcessGroupNCCL::abort() {
  std::vector<std::weak_ptr<char>> kernels;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [key, connected] : connected_) {
      connected.communicator->abort();
      kernels.push_back(connected.kernels);
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + options_->timeout;
  for (const auto& of_one : kernels) {
    while (of_one.use_count() > 1) {
      if (std::chrono::steady_clock::now() > deadline) C10_THROW_ERROR(DistBackendError, "the abort takes too long");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// The lock is held, as c10d does it: an abort has to wait until the kernels are done.
void ProcessGroupNCCL::shutdown() {
  const std::lock_guard lock(mutex_);
  suffer(simulated::faults().in_shutdown);
  for (auto& [key, connected] : connected_) simulated::stream_of(connected.stream).synchronize();
}

ProcessGroupNCCL::Connected ProcessGroupNCCL::connect(const std::string& key, int rank, int size) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = connected_.find(key); found != connected_.end()) {
      if (!found->second.communicator->is_aborted()) return found->second;
      C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted");
    }
  }
  const auto communicator = std::make_shared<Communicator>(store_, key, rank, size);
  if (!communicator->join()) {
    simulated::report("NCCL would wait for ever: ncclCommInitRank of rank " + std::to_string(rank));
    C10_THROW_ERROR(DistBackendError, "members did not come to ncclCommInitRank");
  }
  const auto stream = simulated::Guard().getStreamFromGlobalPool(*bound_device_id_, options_->is_high_priority_stream);
  const std::lock_guard lock(mutex_);
  return connected_.emplace(key, Connected{communicator, stream}).first->second;
}

WorkPtr ProcessGroupNCCL::launch(OpType type, const Connected& connected, const std::string& what, const Tensors& in,
                                 const Tensors& out, const DoWork& work) {
  const auto current = simulated::Guard().getStream(*bound_device_id_);
  c10::Event ready(simulated::kType);
  ready.record(current);
  ready.block(connected.stream);
  std::vector<Use> uses;
  std::vector<View> in_views, out_views;
  for (const auto& tensor : in) {
    in_views.push_back(memory_of(tensor));
    uses.push_back({in_views.back(), false});
  }
  for (const auto& tensor : out) {
    out_views.push_back(memory_of(tensor));
    uses.push_back({out_views.back(), true});
  }
  auto& stream = simulated::stream_of(connected.stream);
  const bool watched = !simulated::is_recorded(stream);  // c10d's watchdog knows no kernels of graphs
  const auto end_late = [=, error = error_] {
    if (!watched) {
      simulated::report("NCCL would wait for ever: a graph's " + what);
    } else if (!watchdog_spares_the_process()) {
      simulated::report("NCCL's watchdog would end the process: " + what + " came to its timeout");
    }
    connected.communicator->abort();
    if (watched) error->store(ErrorType::TIMEOUT);
  };
  const std::chrono::milliseconds limit = watched ? options_->timeout : Communicator::kStuck;
  simulated::launch(stream, {"NCCL's " + what, uses, [=]() -> simulated::Task {
                               const uint64_t ticket = connected.communicator->take_ticket();
                               return [=] {
                                 suffer(simulated::faults().in_kernel);
                                 const auto end =
                                     connected.communicator->meet(ticket, what, in_views, out_views, work, limit);
                                 if (end == Communicator::End::late) end_late();
                               };
                             }});
  Tensors stash = in;
  stash.insert(stash.end(), out.begin(), out.end());
  return c10::make_intrusive<KernelWork>(rank_, type, connected.stream, std::move(stash), out);
}

WorkPtr ProcessGroupNCCL::collective(OpType type, const std::string& what, const Tensors& in, const Tensors& out,
                                     const DoWork& work) {
  check_dense(in);
  check_dense(out);
  return launch(type, connect("all", rank_, size_), what, in, out, work);
}

// Lazy: a communicator, and a stream, of the pair's own. Eager: the pair's kernels are on the group's stream.
WorkPtr ProcessGroupNCCL::message(at::Tensor& tensor, int peer, bool sends) {
  const int low = std::min(rank_, peer), high = std::max(rank_, peer), place = rank_ == low ? 0 : 1;
  const std::string key = std::to_string(low) + ":" + std::to_string(high);
  if (eager_) {
    const Connected group = connect("all", rank_, size_);
    const std::lock_guard lock(mutex_);
    connected_.try_emplace(key, Connected{std::make_shared<Communicator>(store_, key, place, 2), group.stream});
  }
  const Connected pair = connect(key, place, 2);
  tensor.record_stream(pair.stream);
  const Tensors in = sends ? Tensors{tensor} : Tensors{}, out = sends ? Tensors{} : Tensors{tensor};
  return launch(sends ? OpType::SEND : OpType::RECV, pair, "message " + text(tensor), in, out, [](Meeting& meeting) {
    const Tensors& theirs = meeting.in[static_cast<size_t>(1 - meeting.rank)];
    if (theirs.empty() != meeting.out.empty()) {
      return simulated::report("two sends or two receives of NCCL meet, where it would wait for ever");
    }
    if (!theirs.empty()) meeting.out[0].copy_(theirs[0]);
  });
}

}  // namespace c10d
