// This is lockstep's own c10d backend for ranks that are threads of one process. It makes each collective a Call with
// shares of work.
#include <lockstep/devices/devices.hpp>

#include "base/classic.hpp"
#include "comm/own_backend.hpp"
#include "comm/reduction.hpp"
#include "comm/texts.hpp"
#include "comm/tree_average.hpp"
#include "comm/world.hpp"
#include "data/parts.hpp"
#include "exchange.hpp"
#include "in_process_work.hpp"

#include <algorithm>
#include <set>

namespace lockstep::comm {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A collective of so few bytes is done by one rank: the others would come too late to help.
constexpr size_t kWholeBytes = 16384;

// Gives the elements that share `share` covers of a tensor; all shares together cover the whole tensor.
Range part_of_share(const Tensor& tensor, const Operation& operation, int share) {
  return part_of(tensor.numel(), share, operation.shares());
}

void write(const Tensor& to, const Tensor& from) {
  to.copy_(from, /*non_blocking=*/true);
}

using Pointers = c10::SmallVector<const Tensor*, 8>;

// Gives the tensors that every member changes in place.
Pointers in_of_all(const Operation& operation) {
  Pointers tensors;
  for (const auto& member : operation.members()) tensors.push_back(&member.call.in[0]);
  return tensors;
}

// Gives the rows of an average in a tree.
Pointers rows_of_all(const Operation& operation) {
  Pointers rows;
  for (const auto& member : operation.members()) {
    for (const auto& row : member.call.in) rows.push_back(&row);
  }
  return rows;
}

// Ranks that change the same memory would add that to itself.
std::string check_own_memory(const Operation& operation) {
  const auto& members = operation.members();
  for (size_t i = 1; i < members.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!share_memory(members[i].call.in[0], members[j].call.in[0])) continue;
      return text_of_same_memory(operation.in_world(members[j].rank), operation.in_world(members[i].rank),
                                 members[i].call.signature.text());
    }
  }
  return "";
}

int number_of_gpus(const Devices& devices, const Members& members) {
  std::set<c10::DeviceIndex> gpus;
  for (const int rank : members.ranks) {
    if (!devices[rank].is_cpu()) gpus.insert(devices[rank].index());
  }
  return static_cast<int>(gpus.size());
}

// Gives the first member on GPU `number`; the GPUs of the members' tensors are numbered in the members' order.
size_t first_on_gpu(const Pointers& tensors, int number) {
  std::set<c10::DeviceIndex> known;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (known.insert(tensors[i]->get_device()).second && number-- == 0) return i;
  }
  return 0;
}

// Gives the tensor to write to. It is a copy, to be copied back at the end, if the tensor's elements are not in a row.
Tensor to_write(Call& call, const Tensor& tensor) {
  Tensor packed = in_a_row(tensor);
  if (!packed.is_same(tensor)) call.back.emplace_back(tensor.detach(), packed);
  return packed;
}

// ---- The backend of one rank.

class InProcessBackend : public OwnBackend, public TreeBackend {
 public:
  InProcessBackend(int world_rank, const Members& members, std::shared_ptr<Exchange> exchange)
      : OwnBackend(members.index_of(world_rank), members.size(),
                   {exchange->name(world_rank), exchange->devices()[world_rank], members.index_of(world_rank),
                    members.size()}),
        exchange_(std::move(exchange)),
        group_(exchange_->group(members)),
        gpus_(number_of_gpus(exchange_->devices(), members)) {
    const c10::Device device = exchange_->devices()[world_rank];
    setBoundDeviceId(device.is_cpu() ? std::nullopt : std::optional(device));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const Tensor& tensor = arguments_.only(tensors, "allreduce");
    const auto op = arguments_.checked_op(options.reduceOp, tensor, "allreduce");
    Call call{signature_of("allreduce", tensor)};
    call.signature.reduction = op;
    call.in = {to_write(call, tensor)};
    const bool spread = gpus_ > 1 && tensor.nbytes() > kWholeBytes;  // each GPU adds up one share
    call.shares = spread ? gpus_ : shares_of(tensor);
    call.check = check_own_memory;
    call.work = [op, spread](const Operation& operation, int share) {
      const auto tensors = in_of_all(operation);
      comm::reduce(tensors, op, tensors, part_of_share(*tensors[0], operation, share),
                   spread ? first_on_gpu(tensors, share) : 0);
    };
    return post(OpType::ALLREDUCE, std::move(call), options.timeout, tensors);
  }

  WorkPtr average_in_tree(const Tensors& rows, const TreeAverage& average, Tensor target, bool in_slices) override {
    arguments_.check_tensor(target, "the average in a tree");
    Call call{signature_of_agreed_parts(in_slices ? "reduce_scatter" : "allreduce")};
    call.in = {rows.begin(), rows.end()};
    call.out = {target};
    const bool spread = !in_slices && gpus_ > 1 && target.nbytes() > kWholeBytes;
    call.shares = in_slices ? size_ : spread ? gpus_ : shares_of(target);
    call.check = [count = average.additions.size() + 1,
                  size = target.numel() * (in_slices ? size_ : 1)](const Operation& operation) -> std::string {
      const auto rows = rows_of_all(operation);
      const bool fit = std::all_of(rows.begin(), rows.end(), [&](const Tensor* row) { return row->numel() == size; });
      return rows.size() == count && fit ? ""
                                         : classic_text("the ranks' rows are not ", count, " of ", size, " values");
    };
    call.work = [average, in_slices, spread](const Operation& operation, int share) {
      const auto rows = rows_of_all(operation);
      const Range part = part_of_share(*rows[0], operation, share);
      Pointers targets;
      for (const auto& member : operation.members()) {
        if (!in_slices || member.rank == share) targets.push_back(&member.call.out[0]);
      }
      comm::average_in_tree(rows, average, targets, part, in_slices ? 0 : part.begin,
                            spread ? first_on_gpu(targets, share) : 0);
    };
    return post(in_slices ? OpType::REDUCE_SCATTER : OpType::ALLREDUCE, std::move(call), kNoTimeout, {target});
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor& tensor = arguments_.only(tensors, "broadcast");
    const int root = arguments_.checked_root(options.rootRank, options.rootTensor, "broadcast");
    Call call{signature_of("broadcast", tensor)};
    call.signature.root = root;
    call.in = {rank_ == root ? in_a_row(tensor) : to_write(call, tensor)};
    call.shares = shares_of(tensor);
    call.check = check_own_memory;
    call.work = [root](const Operation& operation, int share) {
      const Range part = part_of_share(operation.call(root).in[0], operation, share);
      const Tensor from = slice(operation.call(root).in[0], part);
      for (const auto& member : operation.members()) {
        if (member.rank != root) write(slice(member.call.in[0], part), from);
      }
    };
    return post(OpType::BROADCAST, std::move(call), options.timeout, tensors);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Tensor& tensor = arguments_.only(tensors, "reduce");
    const int root = arguments_.checked_root(options.rootRank, options.rootTensor, "reduce");
    const auto op = arguments_.checked_op(options.reduceOp, tensor, "reduce");
    Call call{signature_of("reduce", tensor)};
    call.signature.reduction = op;
    call.signature.root = root;
    call.in = {rank_ == root ? to_write(call, tensor) : in_a_row(tensor)};
    call.shares = shares_of(tensor);
    call.check = check_own_memory;
    call.work = [op, root](const Operation& operation, int share) {
      const auto tensors = in_of_all(operation);
      comm::reduce(tensors, op, tensors[root], part_of_share(*tensors[0], operation, share));
    };
    return post(OpType::REDUCE, std::move(call), options.timeout, tensors);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const Tensor& input = arguments_.only(inputs, "allgather");
    arguments_.check_alike(outputs, input, "allgather", "output", "input");
    Call call{signature_of("allgather", input), {in_a_row(input)}};
    for (const auto& output : outputs[0]) call.out.push_back(to_write(call, output));
    return post_allgather(OpType::ALLGATHER, std::move(call), options, outputs[0]);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    arguments_.check_tensor(input, "allgather's input");
    arguments_.check_tensor(output, "allgather's output");
    arguments_.check_whole(output, input, "allgather", "output", "input");
    Call call{signature_of("allgather", input), {in_a_row(input)}};
    call.out = in_equal_parts(to_write(call, output));
    return post_allgather(OpType::_ALLGATHER_BASE, std::move(call), options, {output});
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Tensor& output = arguments_.only(outputs, "reduce_scatter");
    arguments_.check_alike(inputs, output, "reduce_scatter", "input", "output");
    Call call{signature_of("reduce_scatter", output)};
    for (const auto& input : inputs[0]) call.in.push_back(in_a_row(input));
    return post_reduce_scatter(OpType::REDUCE_SCATTER, std::move(call), output, options);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    arguments_.check_tensor(input, "reduce_scatter's input");
    arguments_.check_tensor(output, "reduce_scatter's output");
    arguments_.check_whole(input, output, "reduce_scatter", "input", "output");
    Call call{signature_of("reduce_scatter", output)};
    call.in = in_equal_parts(in_a_row(input));
    return post_reduce_scatter(OpType::_REDUCE_SCATTER_BASE, std::move(call), output, options);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    arguments_.check_list(outputs, "alltoall's outputs");
    arguments_.check_list(inputs, "alltoall's inputs");
    Call call{{.name = "alltoall"}};
    for (const auto& input : inputs) call.in.push_back(in_a_row(input));
    for (const auto& output : outputs) call.out.push_back(to_write(call, output));
    return post_alltoall(OpType::ALLTOALL, std::move(call), options, outputs);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    arguments_.check_tensor(input, "alltoall's input");
    arguments_.check_tensor(output, "alltoall's output");
    Call call{{.name = "alltoall"}};
    call.in = parts_of(in_a_row(input), arguments_.elements_of_parts(input, input_sizes, "alltoall's input"));
    call.out =
        parts_of(to_write(call, output), arguments_.elements_of_parts(output, output_sizes, "alltoall's output"));
    return post_alltoall(OpType::ALLTOALL_BASE, std::move(call), options, {output});
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    const Tensor& tensor = arguments_.only(tensors, "send");
    arguments_.check_peer(destination, "send");
    Call call{signature_of("send to", tensor), {in_a_row(tensor)}};
    call.signature.peer = destination;
    return post_message(OpType::SEND,
                        exchange_->post_message(group_, {rank_, destination, tag}, rank_, as_message(std::move(call))),
                        {});
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    const Tensor& tensor = arguments_.only(tensors, "recv");
    arguments_.check_peer(source, "recv");
    Call call{signature_of("recv from", tensor)};
    call.signature.peer = source;
    call.out = {to_write(call, tensor)};
    return post_message(OpType::RECV,
                        exchange_->post_message(group_, {source, rank_, tag}, rank_, as_message(std::move(call))),
                        tensors);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    const Tensor& tensor = arguments_.only(tensors, "recv");
    Call call{signature_of("recv from any rank", tensor)};
    call.out = {to_write(call, tensor)};
    return post_message(OpType::RECVANYSOURCE,
                        exchange_->post_recv_any(group_, rank_, tag, as_message(std::move(call))), tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return post(OpType::BARRIER, Call{{.name = "barrier"}}, options.timeout, {});
  }

 private:
  // -- Posting.

  WorkPtr post(OpType type, Call call, std::chrono::milliseconds timeout, Tensors result) {
    return c10::make_intrusive<InProcessWork>(rank_, type, exchange_, exchange_->post(group_, rank_, std::move(call)),
                                              timeout, std::move(result));
  }

  WorkPtr post_message(OpType type, std::shared_ptr<Operation> operation, Tensors result) {
    return c10::make_intrusive<InProcessWork>(rank_, type, exchange_, std::move(operation), kNoTimeout,
                                              std::move(result));
  }

  WorkPtr post_allgather(OpType type, Call call, const c10d::AllgatherOptions& options, Tensors result) {
    call.shares = size_;
    call.work = [](const Operation& operation, int share) {
      for (const auto& member : operation.members()) {
        write(member.call.out[share].view({-1}), operation.call(share).in[0].view({-1}));
      }
    };
    return post(type, std::move(call), options.timeout, std::move(result));
  }

  WorkPtr post_reduce_scatter(OpType type, Call call, const Tensor& output, const c10d::ReduceScatterOptions& options) {
    const auto op = arguments_.checked_op(options.reduceOp, output, "reduce_scatter");
    call.signature.reduction = op;
    call.out = {to_write(call, output)};
    call.shares = size_;
    call.work = [op](const Operation& operation, int share) {
      Pointers values;
      for (const auto& member : operation.members()) values.push_back(&member.call.in[share]);
      const Tensor& to = operation.call(share).out[0];
      comm::reduce(values, op, &to, {0, to.numel()});
    };
    return post(type, std::move(call), options.timeout, {output});
  }

  WorkPtr post_alltoall(OpType type, Call call, const c10d::AllToAllOptions& options, Tensors result) {
    call.shares = size_;
    call.work = [](const Operation& operation, int share) {
      const auto& out = operation.call(share).out;
      for (const auto& member : operation.members()) {
        write(out[member.rank].view({-1}), member.call.in[share].view({-1}));
      }
    };
    call.check = [](const Operation& operation) -> std::string {
      for (const auto& from : operation.members()) {
        for (const auto& to : operation.members()) {
          const Tensor& in = from.call.in[to.rank];
          const Tensor& out = to.call.out[from.rank];
          if (in.sizes() == out.sizes() && in.scalar_type() == out.scalar_type()) continue;
          return classic_text("alltoall: rank ", from.rank, " sends ", describe(in), " to rank ", to.rank,
                              ", which expects ", describe(out));
        }
      }
      return "";
    };
    return post(type, std::move(call), options.timeout, std::move(result));
  }

  // A message has two members and one copy.
  static Call as_message(Call call) {
    call.work = [](const Operation& operation, int) {
      const auto [sender, receiver] = sides(operation);
      write(receiver->out[0].view({-1}), sender->in[0].view({-1}));
    };
    call.check = [](const Operation& operation) -> std::string {
      const auto [sender, receiver] = sides(operation);
      const Tensor &in = sender->in[0], &out = receiver->out[0];
      if (in.sizes() == out.sizes() && in.scalar_type() == out.scalar_type()) return "";
      return "one rank called " + sender->signature.text() + ", the other " + receiver->signature.text();
    };
    return call;
  }

  static std::pair<const Call*, const Call*> sides(const Operation& operation) {
    const Call *first = &operation.members()[0].call, *second = &operation.members()[1].call;
    return first->out.empty() ? std::pair(first, second) : std::pair(second, first);
  }

  // -- Parts of a contiguous tensor.

  using Parts = c10::SmallVector<Tensor, 2>;

  Parts parts_of(const Tensor& tensor, const std::vector<int64_t>& sizes) const {
    const Tensors parts = tensor.detach().view({-1}).split_with_sizes(sizes, 0);
    return {parts.begin(), parts.end()};
  }

  Parts in_equal_parts(const Tensor& tensor) const {
    return parts_of(tensor, std::vector<int64_t>(size_, tensor.numel() / size_));
  }

  // One thread queues all of it on GPUs, and more shares would be more launches.
  int shares_of(const Tensor& tensor) const { return !tensor.is_cpu() || tensor.nbytes() <= kWholeBytes ? 1 : size_; }

  const std::shared_ptr<Exchange> exchange_;
  Exchange::Group& group_;
  const int gpus_;  // the number of GPUs of all members
};

class InProcessWorld : public World {
 public:
  InProcessWorld(const Devices& devices, std::chrono::milliseconds timeout)
      : World(devices), exchange_(std::make_shared<Exchange>(devices, timeout)) {}

  c10::intrusive_ptr<c10d::Backend> backend(int rank, const Members& members) override {
    return c10::make_intrusive<InProcessBackend>(rank, members, exchange_);
  }
  void abort(int rank, const Failure& reason) override { exchange_->abort(rank, reason); }
  void leave(int rank) override { exchange_->leave(rank); }

 private:
  const std::shared_ptr<Exchange> exchange_;
};

}  // namespace

std::unique_ptr<World> make_in_process_world(const Devices& devices, std::chrono::milliseconds timeout) {
  return std::make_unique<InProcessWorld>(devices, timeout);
}

}  // namespace lockstep::comm
