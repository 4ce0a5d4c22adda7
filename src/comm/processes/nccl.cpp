// This file makes ranks over c10d's NCCL, each with one communicator rank. Threads of one process find each other
// through a store in memory, processes through the job's store.
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/seconds.hpp"
#include "comm/arguments.hpp"
#include "comm/group_member.hpp"
#include "comm/signature.hpp"
#include "comm/texts.hpp"
#include "devices/check_devices.hpp"
#include "keys_of_members.hpp"
#include "watched_world.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace lockstep::comm {
namespace {

using c10d::ProcessGroupNCCL;
using NcclTensors = std::vector<at::Tensor>;
using NcclWork = c10::intrusive_ptr<c10d::Work>;

constexpr std::chrono::milliseconds kBetweenLooksAtCalls{1};
constexpr std::chrono::hours kUntilCalledOff{24};
constexpr int kFirstWithSharedGpus = 23000;  // the first version of NCCL that lets ranks share a GPU: 2.30.0

// NotedNccl is c10d's NCCL backend and notes the calls that a run compares at its end. Other calls are not noted.
// Arguments that no backend takes are refused in the words of lockstep's own.
class NotedNccl : public ProcessGroupNCCL {
 public:
  NotedNccl(const GroupPlace& place, const c10::Device& device, const c10::intrusive_ptr<Options>& options,
            CallNotes notes)
      : ProcessGroupNCCL(place.store, place.rank, place.size, options),
        arguments_(notes.rank, device, place.rank, place.size),
        notes_(std::move(notes)) {}

  NcclWork allreduce(NcclTensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = arguments_.only(tensors, "allreduce");
    return noted([&] { return ProcessGroupNCCL::allreduce(tensors, options); },
                 [&] { return call_text("allreduce", tensor, options.reduceOp); }, tensor);
  }
  NcclWork broadcast(NcclTensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = arguments_.only(tensors, "broadcast");
    const int root = arguments_.checked_root(options.rootRank, options.rootTensor, "broadcast");
    return noted([&] { return ProcessGroupNCCL::broadcast(tensors, options); },
                 [&] { return call_text("broadcast", tensor, {}, root); }, tensor);
  }
  NcclWork reduce(NcclTensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = arguments_.only(tensors, "reduce");
    const int root = arguments_.checked_root(options.rootRank, options.rootTensor, "reduce");
    return noted([&] { return ProcessGroupNCCL::reduce(tensors, options); },
                 [&] { return call_text("reduce", tensor, options.reduceOp, root); }, tensor);
  }
  NcclWork allgather(std::vector<NcclTensors>& outputs, NcclTensors& inputs,
                     const c10d::AllgatherOptions& options) override {
    return noted([&] { return ProcessGroupNCCL::allgather(outputs, inputs, options); },
                 [&] { return call_text("allgather", inputs[0]); }, outputs, inputs);
  }
  NcclWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return noted([&] { return ProcessGroupNCCL::_allgather_base(output, input, options); },
                 [&] { return call_text("allgather", input); }, output, input);
  }
  NcclWork reduce_scatter(NcclTensors& outputs, std::vector<NcclTensors>& inputs,
                          const c10d::ReduceScatterOptions& options) override {
    return noted([&] { return ProcessGroupNCCL::reduce_scatter(outputs, inputs, options); },
                 [&] { return call_text("reduce_scatter", outputs[0], options.reduceOp); }, outputs, inputs);
  }
  NcclWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override {
    return noted([&] { return ProcessGroupNCCL::_reduce_scatter_base(output, input, options); },
                 [&] { return call_text("reduce_scatter", output, options.reduceOp); }, output, input);
  }
  NcclWork alltoall(NcclTensors& outputs, NcclTensors& inputs, const c10d::AllToAllOptions& options) override {
    return noted([&] { return ProcessGroupNCCL::alltoall(outputs, inputs, options); }, alltoall_text, outputs, inputs);
  }
  NcclWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                         std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return noted([&] { return ProcessGroupNCCL::alltoall_base(output, input, output_sizes, input_sizes, options); },
                 alltoall_text, output, input);
  }
  NcclWork barrier(const c10d::BarrierOptions& options) override {
    return noted([&] { return ProcessGroupNCCL::barrier(options); }, [] { return "barrier"; });
  }
  NcclWork send(NcclTensors& tensors, int destination, int tag) override {
    check(arguments_.only(tensors, "send"));
    arguments_.check_peer(destination, "send");
    auto work = ProcessGroupNCCL::send(tensors, destination, tag);
    notes_.message(destination, /*sends=*/true);
    return work;
  }
  NcclWork recv(NcclTensors& tensors, int source, int tag) override {
    check(arguments_.only(tensors, "recv"));
    arguments_.check_peer(source, "recv");
    auto work = ProcessGroupNCCL::recv(tensors, source, tag);
    notes_.message(source, /*sends=*/false);
    return work;
  }

 private:
  static bool has_bits(const at::Tensor& tensor) { return tensor.is_neg() || tensor.is_conj(); }
  template <class Some>
  static bool has_bits(const std::vector<Some>& list) {
    return std::any_of(list.begin(), list.end(), [](const Some& one) { return has_bits(one); });
  }

  template <class... Some>
  void check(const Some&... tensors) const {
    if (notes_.is_over()) throw Error(text_of_ended_run(notes_.rank));
    if (!(has_bits(tensors) || ...)) return;
    throw Error(
        notes_.rank +
        ": NCCL takes memory as it lies, but a tensor has LibTorch's negative or conjugate bit, which says that "
        "its values are others; give it resolve_neg().resolve_conj() of the tensor");
  }

  template <class Post, class Text, class... Some>
  NcclWork noted(Post&& post, Text&& text, const Some&... tensors) {
    check(tensors...);
    auto work = post();
    notes_.collective(text());
    return work;
  }

  const Arguments arguments_;
  const CallNotes notes_;
};

// Sets what the environment does not have already. Gives true.
bool set_defaults_of_nccl() {
  // c10d's watchdog would end the process at a timeout or an error of NCCL. In mode 2 it only aborts the communicator.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
  // Kernels of a mesh's groups could wait for each other on two GPUs. From 2.26 on NCCL then runs the kernels in the
  // order in which a rank queues them. All ranks have the same order.
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
  return true;
}

// Throws nothing, since the run has failed already, for a reason that is known.
void abort_quietly(ProcessGroupNCCL& backend) noexcept {
  try {
    backend.abort();
  } catch (const std::exception&) {
    return;  // the abort took longer than c10d waits for it, or NCCL refused
  }
}

// Gives the failure that c10d's own watchdog saw before it aborted the communicator.
Failure nccl_failure(c10d::ErrorType error, std::chrono::milliseconds timeout) {
  if (error == c10d::ErrorType::SUCCESS) return {};
  if (error != c10d::ErrorType::TIMEOUT)
    return {"NCCL failed; NCCL_DEBUG=WARN in the environment says more", {Error::machine}};
  return {"waited " + seconds(timeout) + " in a call of NCCL" + kSameCallsInOrder, {Error::late}};
}

// c10d takes a communicator down under a lock that its abort needs, so nothing may wait there any more. Therefore a
// last call comes first. This call completes after all earlier ones, and an abort ends it too. It is not noted.
void take_down(ProcessGroupNCCL& backend, const c10::Device& device, const std::stop_token& stop) {
  const c10::DeviceGuard guard(device);
  NcclTensors nothing{at::zeros({1}, at::TensorOptions(device))};
  const auto work = backend.ProcessGroupNCCL::allreduce(nothing, {});
  while (!work->isCompleted()) {
    if (stop.stop_requested()) return;
    std::this_thread::sleep_for(kBetweenLooksAtCalls);
  }
  if (!stop.stop_requested()) backend.shutdown();
}

}  // namespace

GroupMember make_nccl_group(const GroupPlace& place, const c10::Device& device, const CallNotes& notes) {
  static const bool are_set = set_defaults_of_nccl();
  static_cast<void>(are_set);
  const c10::DeviceGuard guard(device);
  auto options = ProcessGroupNCCL::Options::create();
  options->timeout = place.timeout;
  options->is_high_priority_stream = true;  // otherwise its kernels would queue behind the computation
  wait_for_members(place, "here", kUntilCalledOff);
  const auto backend = c10::make_intrusive<NotedNccl>(place, device, options, notes);
  backend->setBoundDeviceId(device);
  backend->eagerConnectSingleDevice(device);
  return {.backend = backend,
          .close = [backend] { abort_quietly(*backend); },
          .error = [backend, timeout = place.timeout] { return nccl_failure(backend->getError(), timeout); },
          .take_down = [backend, device](const std::stop_token& stop) { take_down(*backend, device, stop); }};
}

std::string why_no_gpu_is_shared() {
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  const bool is_set = set != nullptr && std::strtoll(set, nullptr, 0) != 0;
  if (is_set && c10d::getNcclVersionNumber() >= kFirstWithSharedGpus) return "";
  return "NCCL needs a GPU for each rank. From 2.30 on it lets ranks share one, for tests, if "
         "NCCL_MULTI_RANK_GPU_ENABLE=1 is in the environment of all processes; here it is NCCL " +
         c10d::getNcclVersion() + (is_set ? "" : ", without that variable");
}

std::unique_ptr<World> make_nccl_world(const Devices& devices, std::chrono::milliseconds timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return std::make_unique<WatchedWorld>(
      WatchedPlace{.roster = {.by_process = {devices}, .shares_gpus = share_a_gpu(devices)},
                   .monitor_store = store,
                   .groups_store = store,
                   .timeout = timeout,
                   .connect_timeout = timeout},
      Monitor::Options{.timeout = timeout, .silence = {kUntilCalledOff, kUntilCalledOff}, .host = "this process"});
}

}  // namespace lockstep::comm
