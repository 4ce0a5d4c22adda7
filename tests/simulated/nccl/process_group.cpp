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

#include "simulated/device/guard.hpp"
#include "simulated/device/launch.hpp"
#include "simulated/device/reports.hpp"
#include "simulated/nccl/kernel_work.hpp"

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
std::vector<at::Tensor> inputs_of(const Meeting& meeting, size_t place) {
  std::vector<at::Tensor> values;
  for (const auto& views : meeting.in) values.push_back(views[place].on_stream());
  return values;
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
                    [op](Meeting& meeting) {
                      const at::Tensor sum = reduced(inputs_of(meeting, 0), op);
                      for (auto& views : meeting.out) views[0].on_stream().copy_(sum);
                    });
}

WorkPtr ProcessGroupNCCL::broadcast(Tensors& tensors, const BroadcastOptions& options) {
  const auto root = static_cast<size_t>(options.rootRank);
  return collective(OpType::BROADCAST, "broadcast " + text(tensors[0]), tensors, tensors, [root](Meeting& meeting) {
    const at::Tensor value = meeting.in[root][0].on_stream();
    for (auto& views : meeting.out) views[0].on_stream().copy_(value);
  });
}

WorkPtr ProcessGroupNCCL::reduce(Tensors& tensors, const ReduceOptions& options) {
  const ReduceOp::RedOpType op = options.reduceOp;
  const auto root = static_cast<size_t>(options.rootRank);
  return collective(
      OpType::REDUCE, "reduce " + text(tensors[0]) + " " + std::to_string(op), tensors, tensors,
      [op, root](Meeting& meeting) { meeting.out[root][0].on_stream().copy_(reduced(inputs_of(meeting, 0), op)); });
}

WorkPtr ProcessGroupNCCL::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions&) {
  return collective(OpType::ALLGATHER, "allgather " + text(inputs[0]), inputs, outputs[0], [](Meeting& meeting) {
    for (auto& views : meeting.out) {
      for (size_t i = 0; i < views.size(); ++i) views[i].on_stream().copy_(meeting.in[i][0].on_stream());
    }
  });
}

WorkPtr ProcessGroupNCCL::_allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions&) {
  return collective(OpType::_ALLGATHER_BASE, "allgather " + text(input), {input}, {output}, [](Meeting& meeting) {
    std::vector<at::Tensor> values;
    for (const auto& value : inputs_of(meeting, 0)) values.push_back(value.flatten());
    for (auto& views : meeting.out) views[0].on_stream().view({-1}).copy_(at::cat(values));
  });
}

WorkPtr ProcessGroupNCCL::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const ReduceScatterOptions& options) {
  const ReduceOp::RedOpType op = options.reduceOp;
  return collective(OpType::REDUCE_SCATTER, "reduce_scatter " + text(outputs[0]), inputs[0], outputs,
                    [op](Meeting& meeting) {
                      for (size_t rank = 0; rank < meeting.out.size(); ++rank) {
                        meeting.out[rank][0].on_stream().copy_(reduced(inputs_of(meeting, rank), op));
                      }
                    });
}

WorkPtr ProcessGroupNCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const ReduceScatterOptions& options) {
  const ReduceOp::RedOpType op = options.reduceOp;
  return collective(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter " + text(output), {input}, {output},
                    [op](Meeting& meeting) {
                      const auto size = static_cast<int64_t>(meeting.out.size());
                      const auto parts = reduced(inputs_of(meeting, 0), op).flatten().chunk(size);
                      for (size_t rank = 0; rank < parts.size(); ++rank) {
                        meeting.out[rank][0].on_stream().view({-1}).copy_(parts[rank]);
                      }
                    });
}

WorkPtr ProcessGroupNCCL::alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions&) {
  return collective(OpType::ALLTOALL, "alltoall", inputs, outputs, [](Meeting& meeting) {
    for (size_t to = 0; to < meeting.out.size(); ++to) {
      for (size_t from = 0; from < meeting.in.size(); ++from) {
        meeting.out[to][from].on_stream().view({-1}).copy_(meeting.in[from][to].on_stream().flatten());
      }
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
  connect("all", rank_, size_);
}

void ProcessGroupNCCL::abort() {
  std::vector<std::weak_ptr<char>> kernels;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [key, connected] : connected_) {
      connected.communicator->abort(connected.rank);
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

void ProcessGroupNCCL::shutdown() {
  const std::lock_guard lock(mutex_);
  for (auto& [key, connected] : connected_) simulated::stream_of(connected.stream).synchronize();
}

ProcessGroupNCCL::Connected ProcessGroupNCCL::connect(const std::string& key, int rank, int size) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = connected_.find(key); found != connected_.end()) {
      if (!found->second.communicator->is_aborted(rank)) return found->second;
      C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted");
    }
  }
  if (rank == 0) {
    const std::string number = simulated::add_communicator(size);
    store_->set("id " + key, std::vector<uint8_t>(number.begin(), number.end()));
  }
  const auto number = store_->get("id " + key);
  const auto communicator = simulated::find_communicator({number.begin(), number.end()});
  if (!communicator->join()) {
    simulated::report("NCCL would wait for ever: ncclCommInitRank of rank " + std::to_string(rank));
    C10_THROW_ERROR(DistBackendError, "members did not come to ncclCommInitRank");
  }
  const auto stream = simulated::Guard().getStreamFromGlobalPool(*bound_device_id_, options_->is_high_priority_stream);
  const std::lock_guard lock(mutex_);
  return connected_.emplace(key, Connected{communicator, stream, rank}).first->second;
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
    in_views.emplace_back(tensor);
    uses.push_back({in_views.back(), false});
  }
  for (const auto& tensor : out) {
    out_views.emplace_back(tensor);
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
    connected.communicator->abort(connected.rank);
    if (watched) error->store(ErrorType::TIMEOUT);
  };
  const std::chrono::milliseconds limit = watched ? options_->timeout : Communicator::kStuck;
  simulated::launch(stream, {"NCCL's " + what, uses, [=]() -> simulated::Task {
                               const uint64_t ticket = connected.communicator->take_ticket(connected.rank);
                               return [=] {
                                 const auto end = connected.communicator->meet(connected.rank, ticket, what, in_views,
                                                                               out_views, work, limit);
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
    connected_.try_emplace(key, Connected{group.communicator->pair(low, high), group.stream, place});
  }
  const Connected pair = connect(key, place, 2);
  tensor.record_stream(pair.stream);
  const Tensors in = sends ? Tensors{tensor} : Tensors{}, out = sends ? Tensors{} : Tensors{tensor};
  return launch(sends ? OpType::SEND : OpType::RECV, pair, "message " + text(tensor), in, out, [](Meeting& meeting) {
    const size_t sender = meeting.in[0].empty() ? 1 : 0, receiver = 1 - sender;
    if (meeting.in[sender].empty() || meeting.out[receiver].empty()) {
      return simulated::report("two sends or two receives of NCCL meet, where it would wait for ever");
    }
    meeting.out[receiver][0].on_stream().copy_(meeting.in[sender][0].on_stream());
  });
}

}  // namespace c10d
