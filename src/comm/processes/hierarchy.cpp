#include "hierarchy.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>
#include <lockstep/base/error.hpp>

#include "base/start_thread.hpp"
#include "comm/arguments.hpp"
#include "comm/reduction.hpp"
#include "comm/texts.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::comm {

using c10d::ReduceOp;

namespace {

// An average is a sum until all processes have added their values.
ReduceOp::RedOpType op_inside(ReduceOp::RedOpType op) {
  return op == ReduceOp::AVG ? ReduceOp::SUM : op;
}

// Reduces the calls' values in the order of the ranks into `target`, which may be one of them.
void reduce_inside(const std::vector<Hierarchy::RankCall>& calls, const at::Tensor& target) {
  c10::SmallVector<const at::Tensor*, 8> values;
  for (const auto& call : calls) values.push_back(&call.flat);
  const at::Tensor* const to = &target;
  comm::reduce(values, op_inside(calls[0].op), to, {0, target.numel()});
}

}  // namespace

class Hierarchy::Promise : public c10d::Work {
 public:
  using Work::Work;
  void keep() { finish(); }
  void break_off(const std::exception_ptr& cause) { finish(cause); }
  void synchronize() override {}  // Work::wait() calls it when all is done
};

Hierarchy::Hierarchy(GroupMember leaders, const Roster& roster, int process, int threads)
    : leaders_(std::move(leaders)),
      roster_(roster),
      process_(process),
      ranks_(roster.ranks_of(process)),
      world_size_(static_cast<int>(roster.devices().size())),
      next_(ranks_.size(), 0),
      courier_(start_thread([this, threads] { run(threads); })) {}

Hierarchy::~Hierarchy() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  courier_.join();
}

void Hierarchy::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  leaders_.close();
}

c10::intrusive_ptr<c10d::Work> Hierarchy::post(int rank, RankCall call) {
  const auto place = static_cast<size_t>(rank - ranks_.begin);
  const auto promise = c10::make_intrusive<Promise>();
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(roster_.name(rank) + ": " + call.text + ": the run has failed");
    const auto number = static_cast<size_t>(next_[place]++ - first_);
    while (queue_.size() <= number) {
      queue_.push_back(std::make_shared<JointCall>());
      queue_.back()->calls.resize(ranks_.size());
      queue_.back()->promises.resize(ranks_.size());
    }
    JointCall& joint = *queue_[number];
    for (size_t other = 0; other < joint.calls.size(); ++other) {
      if (!joint.promises[other]) continue;
      const RankCall& theirs = joint.calls[other];
      const int their_rank = static_cast<int>(ranks_.begin) + static_cast<int>(other);
      if (theirs.text != call.text) {
        throw Error(
            text_of_different_calls("", {roster_.name(their_rank), theirs.text}, {roster_.name(rank), call.text}),
            {Error::difference, {std::min(rank, their_rank), std::max(rank, their_rank)}});
      }
      if (call.kind != Kind::barrier && share_memory(call.flat, theirs.flat)) {
        throw Error(text_of_same_memory(std::min(rank, their_rank), std::max(rank, their_rank), call.text),
                    {Error::difference, {std::min(rank, their_rank), std::max(rank, their_rank)}});
      }
    }
    joint.calls[place] = std::move(call);
    joint.promises[place] = promise;
    ++joint.posted;
  }
  changed_.notify_all();
  return promise;
}

void Hierarchy::run(int threads) {
  at::set_num_threads(threads);
  const c10::InferenceMode mode;  // the ranks' tensors may be of that mode
  for (;;) {
    std::shared_ptr<JointCall> joint;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || (!queue_.empty() && queue_[0]->posted == queue_[0]->calls.size()); });
      if (closed_) break;
      joint = queue_[0];
      queue_.pop_front();
      ++first_;
    }
    try {
      work(*joint);
      for (const auto& promise : joint->promises) promise->keep();
    } catch (...) {
      for (const auto& promise : joint->promises) promise->break_off(std::current_exception());
    }
  }
  fail_all(std::make_exception_ptr(Error("the run has failed")));
}

void Hierarchy::fail_all(const std::exception_ptr& cause) {
  std::deque<std::shared_ptr<JointCall>> rest;
  {
    const std::lock_guard lock(mutex_);
    rest.swap(queue_);
  }
  for (const auto& joint : rest) {
    for (const auto& promise : joint->promises) {
      if (promise) promise->break_off(cause);
    }
  }
}

void Hierarchy::complete(const Pending& pending) {
  const bool closed = [this] {
    const std::lock_guard lock(mutex_);
    return closed_;
  }();
  if (pending.work) pending.work->wait(closed ? kUntilClosed : kUntilItComes);
  if (pending.finish) pending.finish();
}

void Hierarchy::work(JointCall& joint) {
  leaders_.use_tag(joint.calls[0].tag);
  switch (joint.calls[0].kind) {
    case Kind::allreduce:
      return allreduce(joint.calls);
    case Kind::reduce:
      return reduce(joint.calls);
    case Kind::broadcast:
      return broadcast(joint.calls);
    case Kind::barrier:
      return complete(start_barrier(*leaders_.backend));
  }
}

void Hierarchy::allreduce(const std::vector<RankCall>& calls) {
  const at::Tensor& sum = calls[0].flat;
  reduce_inside(calls, sum);
  complete(start_allreduce(*leaders_.backend, sum, calls[0].op, world_size_));
  for (size_t i = 1; i < calls.size(); ++i) calls[i].flat.copy_(sum);
}

// It is an allreduce, so that the root's bits are the same; only the root keeps them.
void Hierarchy::reduce(const std::vector<RankCall>& calls) {
  const at::Tensor sum = at::empty_like(calls[0].flat);
  reduce_inside(calls, sum);
  complete(start_allreduce(*leaders_.backend, sum, calls[0].op, world_size_));
  const int root = calls[0].root;
  if (roster_.process_of(root) == process_) calls[root - ranks_.begin].flat.copy_(sum);
}

void Hierarchy::broadcast(const std::vector<RankCall>& calls) {
  const int root = calls[0].root, from = roster_.process_of(root);
  const size_t source = from == process_ ? root - ranks_.begin : 0;
  const at::Tensor& values = calls[source].flat;
  if (values.numel() == 0) return complete(start_barrier(*leaders_.backend));
  std::vector<at::Tensor> bytes{as_bytes(values)};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  options.timeout = kUntilItComes;
  complete({leaders_.backend->broadcast(bytes, options)});
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i != source) calls[i].flat.copy_(values);
  }
}

}  // namespace lockstep::comm
