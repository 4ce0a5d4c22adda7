// lockstep's own c10d backend for ranks that are threads of one process: each collective as a Call with its shares of
// work.
#include <c10/util/StringUtil.h>
#include <lockstep/error.hpp>
#include <lockstep/split.hpp>

#include "comm/exchange.hpp"
#include "comm/in_process_work.hpp"
#include "comm/reduction.hpp"
#include "comm/world.hpp"

namespace lockstep::comm {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Slice `share` of a flat tensor.
Tensor slice(const Tensor& flat, const Operation& operation, int share) {
  const Part part = part_of(flat.numel(), share, operation.shares());
  return flat.narrow(0, part.begin, part.size());
}

Tensors slices_of_all(const Operation& operation, int share) {
  Tensors slices;
  for (const int rank : operation.members()) slices.push_back(slice(operation.call(rank).in[0], operation, share));
  return slices;
}

void write(const Tensor& to, const Tensor& from) {
  to.copy_(from, /*non_blocking=*/true);
}

// ---- Tensors of a call.

std::string describe(const Tensor& tensor) {
  return c10::str(tensor.dtype().name(), " ", tensor.sizes());
}

std::string describe(const Tensors& tensors) {
  std::string text = "[";
  for (const auto& tensor : tensors) text += (text.size() > 1 ? ", " : "") + describe(tensor);
  return text + "]";
}

// `tensor` as one dimension in memory order of its elements, to be read.
Tensor flat_to_read(const Tensor& tensor) {
  return tensor.detach().contiguous().view({-1});
}

// The same to be written: a tensor that is not contiguous is written through a copy.
Tensor flat_to_write(Call& call, const Tensor& tensor) {
  const Tensor detached = tensor.detach();
  if (detached.is_contiguous()) return detached.view({-1});
  const Tensor packed = detached.contiguous();
  call.back.emplace_back(detached, packed);
  return packed.view({-1});
}

// ---- The backend of one rank.

class InProcessBackend : public c10d::Backend {
 public:
  InProcessBackend(int rank, std::shared_ptr<Exchange> exchange)
      : Backend(rank, static_cast<int>(exchange->devices().size())), exchange_(std::move(exchange)) {
    setBoundDeviceId(exchange_->devices()[rank].is_cpu() ? std::nullopt : std::optional(exchange_->devices()[rank]));
  }

  const std::string getBackendName() const override { return "lockstep"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const Tensor& tensor = only(tensors, "allreduce");
    const auto op = checked(options.reduceOp, tensor, "allreduce");
    Call call{"allreduce(" + name_of(options.reduceOp) + ") of " + describe(tensor)};
    call.in = call.out = {flat_to_write(call, tensor)};
    call.work = [op](const Operation& operation, int share) {
      const Tensors slices = slices_of_all(operation, share);
      const Tensor sum = reduce_in_order(slices, op, slices[share].device(), /*overwrite_first=*/true);
      for (const auto& to : slices) {
        if (!to.is_same(sum)) write(to, sum);
      }
    };
    return post(OpType::ALLREDUCE, std::move(call), options.timeout, tensors);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor& tensor = only(tensors, "broadcast");
    const int root = checked_rank(options.rootRank, "broadcast's root");
    Call call{"broadcast(root " + std::to_string(root) + ") of " + describe(tensor)};
    call.in = {rank_ == root ? flat_to_read(tensor) : flat_to_write(call, tensor)};
    call.work = [root](const Operation& operation, int share) {
      const Tensors slices = slices_of_all(operation, share);
      for (const int rank : operation.members()) {
        if (rank != root) write(slices[rank], slices[root]);
      }
    };
    return post(OpType::BROADCAST, std::move(call), options.timeout, tensors);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Tensor& tensor = only(tensors, "reduce");
    const int root = checked_rank(options.rootRank, "reduce's root");
    const auto op = checked(options.reduceOp, tensor, "reduce");
    Call call{"reduce(" + name_of(options.reduceOp) + ", root " + std::to_string(root) + ") of " + describe(tensor)};
    call.in = {rank_ == root ? flat_to_write(call, tensor) : flat_to_read(tensor)};
    call.work = [op, root](const Operation& operation, int share) {
      const Tensors slices = slices_of_all(operation, share);
      const Tensor sum = reduce_in_order(slices, op, slices[root].device(), /*overwrite_first=*/root == 0);
      if (!sum.is_same(slices[root])) write(slices[root], sum);
    };
    return post(OpType::REDUCE, std::move(call), options.timeout, tensors);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const Tensor& input = only(inputs, "allgather");
    if (outputs.size() != 1)
      refuse("allgather takes one list of output tensors, got " + std::to_string(outputs.size()));
    check_list(outputs[0], "allgather's outputs");
    for (const auto& output : outputs[0]) {
      if (output.numel() != input.numel() || output.scalar_type() != input.scalar_type()) {
        refuse("allgather's outputs must each be like its input, " + describe(input) + ", but are " +
               describe(outputs[0]));
      }
    }
    Call call{"allgather of " + describe(input), {flat_to_read(input)}};
    for (const auto& output : outputs[0]) call.out.push_back(flat_to_write(call, output));
    return post_allgather(OpType::ALLGATHER, std::move(call), options, outputs[0]);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    check_tensor(input, "allgather's input");
    check_tensor(output, "allgather's output");
    if (output.numel() != input.numel() * size_ || output.scalar_type() != input.scalar_type()) {
      refuse("allgather's output must hold " + std::to_string(size_) + " inputs of " + describe(input) + ", but is " +
             describe(output));
    }
    Call call{"allgather of " + describe(input), {flat_to_read(input)}};
    call.out = in_equal_parts(flat_to_write(call, output));
    return post_allgather(OpType::_ALLGATHER_BASE, std::move(call), options, {output});
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Tensor& output = only(outputs, "reduce_scatter");
    if (inputs.size() != 1)
      refuse("reduce_scatter takes one list of input tensors, got " + std::to_string(inputs.size()));
    check_list(inputs[0], "reduce_scatter's inputs");
    for (const auto& input : inputs[0]) {
      if (input.numel() != output.numel() || input.scalar_type() != output.scalar_type()) {
        refuse("reduce_scatter's inputs must each be like its output, " + describe(output) + ", but are " +
               describe(inputs[0]));
      }
    }
    Call call;
    for (const auto& input : inputs[0]) call.in.push_back(flat_to_read(input));
    return post_reduce_scatter(OpType::REDUCE_SCATTER, std::move(call), output, options);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check_tensor(input, "reduce_scatter's input");
    check_tensor(output, "reduce_scatter's output");
    if (input.numel() != output.numel() * size_ || output.scalar_type() != input.scalar_type()) {
      refuse("reduce_scatter's input must hold " + std::to_string(size_) + " outputs of " + describe(output) +
             ", but is " + describe(input));
    }
    Call call;
    call.in = in_equal_parts(flat_to_read(input));
    return post_reduce_scatter(OpType::_REDUCE_SCATTER_BASE, std::move(call), output, options);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    check_list(outputs, "alltoall's outputs");
    check_list(inputs, "alltoall's inputs");
    Call call;
    for (const auto& input : inputs) call.in.push_back(flat_to_read(input));
    for (const auto& output : outputs) call.out.push_back(flat_to_write(call, output));
    return post_alltoall(OpType::ALLTOALL, std::move(call), options, outputs);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    check_tensor(input, "alltoall's input");
    check_tensor(output, "alltoall's output");
    Call call;
    call.in = in_parts(flat_to_read(input), input, input_sizes, "alltoall's input");
    call.out = in_parts(flat_to_write(call, output), output, output_sizes, "alltoall's output");
    return post_alltoall(OpType::ALLTOALL_BASE, std::move(call), options, {output});
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    const Tensor& tensor = only(tensors, "send");
    checked_peer(destination, "send");
    Call call{"send to rank " + std::to_string(destination) + " of " + describe(tensor), {flat_to_read(tensor)}};
    return post_message(OpType::SEND, exchange_->post_send(rank_, destination, tag, as_message(std::move(call))), {});
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    const Tensor& tensor = only(tensors, "recv");
    checked_peer(source, "recv");
    Call call{"recv from rank " + std::to_string(source) + " of " + describe(tensor)};
    call.out = {flat_to_write(call, tensor)};
    return post_message(OpType::RECV, exchange_->post_recv(rank_, source, tag, as_message(std::move(call))), tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return post(OpType::BARRIER, Call{"barrier"}, options.timeout, {});
  }

 private:
  // -- Posting.

  WorkPtr post(OpType type, Call call, std::chrono::milliseconds timeout, Tensors result) {
    return c10::make_intrusive<InProcessWork>(rank_, type, exchange_, exchange_->post(rank_, std::move(call)), timeout,
                                              std::move(result));
  }

  WorkPtr post_message(OpType type, std::shared_ptr<Operation> operation, Tensors result) {
    return c10::make_intrusive<InProcessWork>(rank_, type, exchange_, std::move(operation), kNoTimeout,
                                              std::move(result));
  }

  WorkPtr post_allgather(OpType type, Call call, const c10d::AllgatherOptions& options, Tensors result) {
    call.work = [](const Operation& operation, int share) {
      for (const int rank : operation.members()) write(operation.call(rank).out[share], operation.call(share).in[0]);
    };
    return post(type, std::move(call), options.timeout, std::move(result));
  }

  WorkPtr post_reduce_scatter(OpType type, Call call, const Tensor& output, const c10d::ReduceScatterOptions& options) {
    const auto op = checked(options.reduceOp, output, "reduce_scatter");
    call.text = "reduce_scatter(" + name_of(options.reduceOp) + ") to " + describe(output);
    call.out = {flat_to_write(call, output)};
    call.work = [op](const Operation& operation, int share) {
      Tensors values;
      for (const int rank : operation.members()) values.push_back(operation.call(rank).in[share]);
      const Tensor& to = operation.call(share).out[0];
      write(to, reduce_in_order(values, op, to.device(), /*overwrite_first=*/false));
    };
    return post(type, std::move(call), options.timeout, {output});
  }

  WorkPtr post_alltoall(OpType type, Call call, const c10d::AllToAllOptions& options, Tensors result) {
    call.text = "alltoall";
    call.work = [](const Operation& operation, int share) {
      const auto& out = operation.call(share).out;
      for (const int rank : operation.members()) write(out[rank], operation.call(rank).in[share]);
    };
    call.check = [](const Operation& operation) -> std::string {
      for (const int from : operation.members()) {
        for (const int to : operation.members()) {
          const Tensor& in = operation.call(from).in[to];
          const Tensor& out = operation.call(to).out[from];
          if (in.numel() == out.numel() && in.scalar_type() == out.scalar_type()) continue;
          return c10::str("alltoall: rank ", from, " sends ", describe(in), " to rank ", to, ", which expects ",
                          describe(out));
        }
      }
      return "";
    };
    return post(type, std::move(call), options.timeout, std::move(result));
  }

  // A message has two members and one copy, which the first share does.
  static Call as_message(Call call) {
    call.work = [](const Operation& operation, int share) {
      if (share != 0) return;
      const auto [sender, receiver] = sides(operation);
      write(receiver->out[0], sender->in[0]);
    };
    call.check = [](const Operation& operation) -> std::string {
      const auto [sender, receiver] = sides(operation);
      const Tensor &in = sender->in[0], &out = receiver->out[0];
      if (in.numel() == out.numel() && in.scalar_type() == out.scalar_type()) return "";
      return "one rank called " + sender->text + ", the other " + receiver->text;
    };
    return call;
  }

  static std::pair<const Call*, const Call*> sides(const Operation& operation) {
    const Call *first = &operation.call(operation.members()[0]), *second = &operation.call(operation.members()[1]);
    return first->out.empty() ? std::pair(first, second) : std::pair(second, first);
  }

  // -- Parts of a flat tensor.

  Tensors in_equal_parts(const Tensor& flat) const {
    return flat.split_with_sizes(std::vector<int64_t>(size_, flat.numel() / size_), 0);
  }

  // One part per rank along the first dimension of `whole`; no sizes given means equal ones.
  Tensors in_parts(const Tensor& flat, const Tensor& whole, const std::vector<int64_t>& sizes,
                   const std::string& what) const {
    const int64_t rows = whole.dim() == 0 ? 1 : whole.size(0);
    std::vector<int64_t> parts = sizes;
    if (parts.empty() && rows % size_ == 0) parts.assign(size_, rows / size_);
    int64_t sum = 0;
    for (const int64_t part : parts) sum += part;
    if (static_cast<int>(parts.size()) != size_ || sum != rows) {
      refuse(c10::str(what, " ", describe(whole), " cannot be cut into ", size_, " parts of sizes ",
                      c10::IntArrayRef(sizes)));
    }
    for (auto& part : parts) part *= rows == 0 ? 0 : flat.numel() / rows;
    return flat.split_with_sizes(parts, 0);
  }

  // -- Arguments.

  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(comm::name_of(rank_, exchange_->devices()) + ": " + why);
  }

  void check_tensor(const Tensor& tensor, const std::string& what) const {
    const c10::Device& device = exchange_->devices()[rank_];
    if (!tensor.defined()) refuse(what + " is an undefined tensor");
    if (tensor.layout() != at::kStrided) refuse(what + " is a sparse tensor; only dense ones can be exchanged");
    if (tensor.device() != device)
      refuse(what + " lies on " + tensor.device().str() + "; move it to this rank's device, " + device.str());
  }

  const Tensor& only(const Tensors& tensors, const std::string& operation) const {
    if (tensors.size() != 1) refuse(operation + " takes one tensor per rank, got " + std::to_string(tensors.size()));
    check_tensor(tensors[0], operation + "'s tensor");
    return tensors[0];
  }

  void check_list(const Tensors& tensors, const std::string& what) const {
    if (static_cast<int>(tensors.size()) != size_) {
      refuse(what + " must be one tensor per rank, " + std::to_string(size_) + ", but are " +
             std::to_string(tensors.size()));
    }
    for (const auto& tensor : tensors) check_tensor(tensor, what);
  }

  int checked_rank(int64_t rank, const std::string& what) const {
    if (rank < 0 || rank >= size_) refuse(c10::str(what, " is rank ", rank, ", but the ranks are 0 to ", size_ - 1));
    return static_cast<int>(rank);
  }

  void checked_peer(int peer, const std::string& operation) const {
    checked_rank(peer, operation + "'s peer");
    if (peer == rank_) refuse(operation + ": a rank cannot exchange messages with itself");
  }

  ReduceOp::RedOpType checked(const ReduceOp& op, const Tensor& tensor, const std::string& operation) const {
    if (op == ReduceOp::AVG && !tensor.is_floating_point() && !tensor.is_complex()) {
      refuse(operation + "(avg) of " + describe(tensor) +
             ": an average of integers is not an integer; use sum, or a floating-point type");
    }
    return op;
  }

  const std::shared_ptr<Exchange> exchange_;
};

class InProcessWorld : public World {
 public:
  InProcessWorld(const Devices& devices, std::chrono::milliseconds timeout)
      : World(devices), exchange_(std::make_shared<Exchange>(devices, timeout)) {}

  c10::intrusive_ptr<c10d::Backend> backend(int rank) override {
    return c10::make_intrusive<InProcessBackend>(rank, exchange_);
  }
  void abort(int rank, const std::string& reason) override { exchange_->abort(rank, reason); }
  void leave(int rank) override { exchange_->leave(rank); }

 private:
  const std::shared_ptr<Exchange> exchange_;
};

}  // namespace

std::string name_of(int rank, const Devices& devices) {
  return "rank " + std::to_string(rank) + " (" + devices[rank].str() + ")";
}

std::unique_ptr<World> make_in_process_world(const Devices& devices, std::chrono::milliseconds timeout) {
  return std::make_unique<InProcessWorld>(devices, timeout);
}

}  // namespace lockstep::comm
