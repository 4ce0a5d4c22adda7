#include "process_backend.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "base/signals.hpp"
#include "comm/purpose.hpp"
#include "comm/reduction.hpp"
#include "comm/signature.hpp"
#include "comm/texts.hpp"
#include "parts.hpp"

#include <algorithm>

namespace lockstep::comm {

using c10d::OpType;
using c10d::ReduceOp;
using Tensor = ProcessBackend::Tensor;
using Tensors = OwnBackend::Tensors;
using WorkPtr = OwnBackend::WorkPtr;

namespace {

// Flat is a tensor as one dimension of stride 1, through a copy if its elements are not in a row. (A view of one value
// could keep another stride.)
struct Flat {
  explicit Flat(const Tensor& tensor)
      : original(tensor.detach()), packed(in_a_row(original)), flat(packed.as_strided({packed.numel()}, {1})) {}

  void copy_back() const {
    if (!packed.is_same(original)) original.copy_(packed);
  }

  Tensor original, packed, flat;
};

Tensors flat_parts(const std::vector<Flat>& list) {
  Tensors parts;
  for (const auto& one : list) parts.push_back(one.flat);
  return parts;
}

std::vector<Flat> flatten(const Tensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

int fingerprint_of(const std::string& text) {
  return static_cast<int>(std::hash<std::string>()(text) & 0xffff);
}

// Gloo brings calls together by their tag alone. If the calls differ, Gloo ends the process for unequal sizes, and
// mixes the values for equal sizes. Therefore the tag holds the call's number and a fingerprint of its text. So calls
// that differ never meet, except for one pair of texts in 65536, and the monitor reports them. Calls of one rank that
// are under way at the same time have different numbers.
uint32_t tag_of(int64_t number, const std::string& text) {
  return static_cast<uint32_t>(number) << 16 | static_cast<uint32_t>(fingerprint_of(text));
}

// c10d's tags of messages have 31 bits.
constexpr int kLargestTag = 0x7fff;

// Tells whether this rank's call itself was wrong; Gloo's own errors are of other types.
bool is_own_mistake(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const Error&) {
    return true;
  } catch (const c10::DistError&) {
    return false;
  } catch (const c10::Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

Pending then(Pending pending, std::function<void()> also) {
  return {pending.work, [first = std::move(pending.finish), also = std::move(also)] {
            const c10::InferenceMode mode;  // the rank's tensors may be of that mode
            if (first) first();
            also();
          }};
}

}  // namespace

ProcessBackend::ProcessBackend(int world_rank, Members members, GroupMember group, StorePtr store,
                               std::shared_ptr<Monitor> monitor, std::shared_ptr<OpenWorks> open,
                               std::chrono::milliseconds timeout)
    : OwnBackend(members.index_of(world_rank), members.size(),
                 {monitor->roster().name(world_rank), c10::kCPU, members.index_of(world_rank), members.size()}),
      world_rank_(world_rank),
      members_(std::move(members)),
      group_(std::move(group)),
      store_(std::move(store)),
      monitor_(std::move(monitor)),
      open_(std::move(open)),
      timeout_(timeout) {
  monitor_->log().join(world_rank_, members_.name);
}

// ---- Collectives that Gloo has.

ReduceOp::RedOpType ProcessBackend::checked_op(const ReduceOp& asked, const Tensor& tensor,
                                               const std::string& operation) const {
  const auto op = arguments_.checked_op(asked, tensor, operation);
  if (reduces(tensor.scalar_type(), op)) return op;
  arguments_.refuse(operation + "(" + name_of(op) + ") of " + describe(tensor) +
                    " is not offered between processes; use another type");
}

void ProcessBackend::refuse_shared_memory(const Tensor& changed, const std::string& text) const {
  const auto other = monitor_->log().changes(world_rank_, members_.name, collective_calls_ - 1, changed);
  if (!other) return;
  throw Error(text_of_same_memory(std::min(world_rank_, *other), std::max(world_rank_, *other), text),
              {Error::difference});
}

WorkPtr ProcessBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Tensor& tensor = arguments_.only(tensors, "allreduce");
  const auto op = checked_op(options.reduceOp, tensor, "allreduce");
  const std::string text = call_text("allreduce", tensor, op);
  return post(OpType::ALLREDUCE, text, options.timeout, tensors, [&] {
    const Flat values(tensor);
    refuse_shared_memory(values.flat, text);
    return then(start_allreduce(*group_.backend, values.flat, op), [values] { values.copy_back(); });
  });
}

WorkPtr ProcessBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Tensor& tensor = arguments_.only(tensors, "reduce");
  const int root = arguments_.checked_root(options.rootRank, options.rootTensor, "reduce");
  const auto op = checked_op(options.reduceOp, tensor, "reduce");
  const std::string text = call_text("reduce", tensor, op, root);
  return post(OpType::REDUCE, text, options.timeout, tensors, [&] {
    const Flat values(tensor);
    refuse_shared_memory(values.flat, text);
    // It is an allreduce of copies, so that the root's bits are an allreduce's.
    const Tensor sum = rank_ == root ? values.flat : values.flat.clone();
    return then(start_allreduce(*group_.backend, sum, op), [values, is_root = rank_ == root] {
      if (is_root) values.copy_back();
    });
  });
}

WorkPtr ProcessBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Tensor& tensor = arguments_.only(tensors, "broadcast");
  const int root = arguments_.checked_root(options.rootRank, options.rootTensor, "broadcast");
  const std::string text = call_text("broadcast", tensor, {}, root);
  return post(OpType::BROADCAST, text, options.timeout, tensors, [&] {
    const Flat values(tensor);
    refuse_shared_memory(values.flat, text);
    if (tensor.numel() == 0) return start_barrier(*group_.backend);
    Tensors bytes{as_bytes(values.flat)};
    c10d::BroadcastOptions theirs;
    theirs.rootRank = root;
    theirs.timeout = kUntilItComes;
    return then({group_.backend->broadcast(bytes, theirs)}, [values, is_root = rank_ == root] {
      if (!is_root) values.copy_back();
    });
  });
}

WorkPtr ProcessBackend::barrier(const c10d::BarrierOptions& options) {
  return post(OpType::BARRIER, "barrier", options.timeout, {}, [&] { return start_barrier(*group_.backend); });
}

// ---- Collectives in which every rank sends its own values.

WorkPtr ProcessBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) {
  const Tensor& input = arguments_.only(inputs, "allgather");
  arguments_.check_alike(outputs, input, "allgather", "output", "input");
  return gather_all(OpType::ALLGATHER, input, outputs[0], outputs[0], options);
}

WorkPtr ProcessBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  arguments_.check_tensor(input, "allgather's input");
  arguments_.check_tensor(output, "allgather's output");
  arguments_.check_whole(output, input, "allgather", "output", "input");
  return gather_all(OpType::_ALLGATHER_BASE, input, {output}, {output}, options);
}

WorkPtr ProcessBackend::gather_all(OpType type, const Tensor& input, const Tensors& outputs, Tensors result,
                                   const c10d::AllgatherOptions& options) {
  return post(type, call_text("allgather", input), options.timeout, std::move(result), [&] {
    if (input.numel() == 0) return start_barrier(*group_.backend);
    Tensor mine = as_bytes(Flat(input).flat);
    Tensor all = at::empty({mine.numel() * size_}, mine.options());
    c10d::AllgatherOptions theirs;
    theirs.timeout = kUntilItComes;
    return then({group_.backend->_allgather_base(all, mine, theirs)}, [outputs, all] {
      int64_t begin = 0;
      for (const auto& output : outputs) {
        const int64_t bytes = output.numel() * output.element_size();
        output.detach().copy_(all.narrow(0, begin, bytes).view(output.scalar_type()).view(output.sizes()));
        begin += bytes;
      }
    });
  });
}

WorkPtr ProcessBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ReduceScatterOptions& options) {
  const Tensor& output = arguments_.only(outputs, "reduce_scatter");
  arguments_.check_alike(inputs, output, "reduce_scatter", "input", "output");
  return scatter_reduced(OpType::REDUCE_SCATTER, flat_parts(flatten(inputs[0])), output, options);
}

WorkPtr ProcessBackend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  arguments_.check_tensor(input, "reduce_scatter's input");
  arguments_.check_tensor(output, "reduce_scatter's output");
  arguments_.check_whole(input, output, "reduce_scatter", "input", "output");
  const Tensors parts = Flat(input).flat.split_with_sizes(std::vector<int64_t>(size_, output.numel()), 0);
  return scatter_reduced(OpType::_REDUCE_SCATTER_BASE, parts, output, options);
}

// Every rank gets its part of all ranks' inputs and adds these in the order of the ranks.
WorkPtr ProcessBackend::scatter_reduced(OpType type, const Tensors& inputs, const Tensor& output,
                                        const c10d::ReduceScatterOptions& options) {
  const auto op = arguments_.checked_op(options.reduceOp, output, "reduce_scatter");
  return post(type, call_text("reduce_scatter", output, op), options.timeout, {output}, [&] {
    Tensors values;
    for (int rank = 0; rank < size_; ++rank) values.push_back(at::empty({output.numel()}, output.options()));
    return exchange(inputs, values, [values, op, to = Flat(output)] {
      c10::SmallVector<const Tensor*, 8> pointers;
      for (const auto& value : values) pointers.push_back(&value);
      const Tensor* const target = &to.flat;
      comm::reduce(pointers, op, target, {0, to.flat.numel()});
      to.copy_back();
    });
  });
}

WorkPtr ProcessBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  arguments_.check_list(outputs, "alltoall's outputs");
  arguments_.check_list(inputs, "alltoall's inputs");
  return post(OpType::ALLTOALL, alltoall_text(), options.timeout, outputs, [&] {
    const auto to = flatten(outputs);
    return exchange(flat_parts(flatten(inputs)), flat_parts(to), [to, forget = compare(inputs, outputs)] {
      for (const auto& one : to) one.copy_back();
      forget();
    });
  });
}

WorkPtr ProcessBackend::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  arguments_.check_tensor(input, "alltoall's input");
  arguments_.check_tensor(output, "alltoall's output");
  const Flat to(output);
  const Tensors outputs =
      to.flat.split_with_sizes(arguments_.elements_of_parts(output, output_sizes, "alltoall's output"), 0);
  const Tensors inputs =
      Flat(input).flat.split_with_sizes(arguments_.elements_of_parts(input, input_sizes, "alltoall's input"), 0);
  return post(OpType::ALLTOALL_BASE, alltoall_text(), options.timeout, {output}, [&] {
    return exchange(inputs, outputs, [to, forget = compare(inputs, outputs)] {
      to.copy_back();
      forget();
    });
  });
}

std::function<void()> ProcessBackend::compare(const Tensors& inputs, const Tensors& outputs) const {
  if (AgreedParts::current() != nullptr) return [] {};
  const std::string prefix = "parts/" + members_.name + "/" + std::to_string(collective_calls_) + "/";
  const std::string left = compare_parts(*store_, prefix, rank_, inputs, outputs);
  return [store = store_, left] { store->deleteKey(left); };
}

Pending ProcessBackend::exchange(const Tensors& inputs, const Tensors& outputs, std::function<void()> finish) const {
  Tensors bytes;
  std::vector<int64_t> to_send, to_receive;
  int64_t received = 0;
  for (const auto& input : inputs) {
    bytes.push_back(as_bytes(input));
    to_send.push_back(bytes.back().numel());
  }
  for (const auto& output : outputs) {
    to_receive.push_back(output.numel() * static_cast<int64_t>(output.element_size()));
    received += to_receive.back();
  }
  Tensor out = at::cat(bytes), in = at::empty({received}, out.options());
  c10d::AllToAllOptions theirs;
  theirs.timeout = kUntilItComes;
  const std::vector<int64_t> sizes = to_receive;  // a copy, since Gloo moves `to_receive`
  return then({group_.backend->alltoall_base(in, out, to_receive, to_send, theirs)},
              [in, sizes, outputs, finish = std::move(finish)] {
                const auto parts = in.split_with_sizes(sizes, 0);
                for (size_t rank = 0; rank < outputs.size(); ++rank) as_bytes(outputs[rank]).copy_(parts[rank]);
                finish();
              });
}

// ---- Messages.

WorkPtr ProcessBackend::send(Tensors& tensors, int destination, int tag) {
  const Tensor& tensor = arguments_.only(tensors, "send");
  arguments_.check_peer(destination, "send");
  const auto message = message_of(tensor, rank_, destination, tag);
  return post_call(OpType::SEND, message.call, {}, {}, [&] {
    Tensors bytes{as_bytes(Flat(tensor).flat)};
    return Pending{group_.backend->send(bytes, destination, message.tag)};
  });
}

WorkPtr ProcessBackend::recv(Tensors& tensors, int source, int tag) {
  const Tensor& tensor = arguments_.only(tensors, "recv");
  arguments_.check_peer(source, "recv");
  const auto message = message_of(tensor, source, rank_, tag);
  return post_call(OpType::RECV, message.call, {}, tensors, [&] {
    const Flat values(tensor);
    Tensors bytes{as_bytes(values.flat)};
    return then({group_.backend->recv(bytes, source, message.tag)}, [values] { values.copy_back(); });
  });
}

// The sender is known once the message is there.
WorkPtr ProcessBackend::recvAnysource(Tensors& tensors, int tag) {
  const Tensor& tensor = arguments_.only(tensors, "recv");
  check_tag(tag);
  if (tag < kFirstOpenTag) {
    arguments_.refuse("a message from any rank has the tag " + std::to_string(tag) +
                      "; between processes such tags start at " + std::to_string(kFirstOpenTag));
  }
  const OpenCall call{.rank = world_rank_, .text = call_text("recv from any rank", tensor)};
  return post_call(OpType::RECVANYSOURCE, call, {}, tensors, [&] {
    const Flat values(tensor);
    Tensors bytes{as_bytes(values.flat)};
    const auto work = group_.backend->recvAnysource(bytes, tag << 16 | fingerprint_of(describe(tensor)));
    return then({work}, [work, values, monitor = monitor_, here = world_rank_, ranks = members_.ranks] {
      values.copy_back();
      monitor->log().add_message(here, ranks[work->sourceRank()], /*sends=*/false);
    });
  });
}

void ProcessBackend::check_tag(int tag) const {
  if (tag >= 0 && tag <= kLargestTag) return;
  arguments_.refuse("a message's tag is " + std::to_string(tag) + "; between processes tags go from 0 to " +
                    std::to_string(kLargestTag));
}

// The n-th send of a tag to a rank meets that rank's n-th recv of the tag.
ProcessBackend::Message ProcessBackend::message_of(const Tensor& tensor, int source, int destination, int tag) {
  check_tag(tag);
  const bool sends = source == rank_;
  const int peer = sends ? destination : source;
  const int64_t number = ++(sends ? sent_ : received_)[{peer, tag}];
  const int peer_in_world = members_.ranks[peer];
  OpenCall call{.rank = world_rank_,
                .text = call_text(sends ? "send to" : "recv from", tensor, {}, -1, peer),
                .peer = peer_in_world,
                .sends = sends,
                .messages = monitor_->log().add_message(world_rank_, peer_in_world, sends),
                .message = classic_text("message ", number, " from rank ", source, " to rank ", destination, ", tag ",
                                        tag, members_.text()),
                .content = describe(tensor)};
  const int fingerprint = fingerprint_of(tag < kFirstOpenTag ? call.message + call.content : call.content);
  return {std::move(call), tag << 16 | fingerprint};
}

// ---- Posting.

WorkPtr ProcessBackend::post(OpType type, const std::string& text, std::chrono::milliseconds timeout, Tensors result,
                             const Start& start) {
  OpenCall call{.rank = world_rank_, .text = text};
  if (!members_.name.empty()) call.among = members_;
  call.number = monitor_->log().add_collective(world_rank_, members_.name, text);
  collective_calls_ = call.number + 1;
  group_.use_tag(tag_of(call.number, text));
  return post_call(type, std::move(call), timeout, std::move(result), start);
}

WorkPtr ProcessBackend::post_call(OpType type, OpenCall call, std::chrono::milliseconds timeout, Tensors result,
                                  const Start& start) {
  const c10::NoGradGuard no_grad;
  if (timeout <= std::chrono::milliseconds::zero()) timeout = timeout_;
  if (monitor_->is_over()) throw Error(text_of_ended_run(monitor_->roster().name(world_rank_)));
  const Monitor::Waiting waiting(*monitor_, call, timeout);
  if (!monitor_->failure().empty()) monitor_->explain(waiting, call, nullptr);
  Pending pending;
  try {
    const SignalBlocked sigpipe_blocked(SIGPIPE);
    pending = start();
  } catch (const std::exception&) {
    const auto cause = std::current_exception();
    if (is_own_mistake(cause)) monitor_->report_own(call, cause);  // else a connection was closed earlier
    monitor_->explain(waiting, call, cause);
  }
  auto work = c10::make_intrusive<ProcessWork>(rank_, type, monitor_, std::move(call), std::move(pending), timeout,
                                               std::move(result), open_);
  open_->add(work);
  return work;
}

}  // namespace lockstep::comm
