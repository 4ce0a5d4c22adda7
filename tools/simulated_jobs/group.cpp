// Groups of a simulation, in the place of src/comm/processes/gloo.cpp: c10d's interface over a Member.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/group_member.hpp"
#include "member.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

namespace lockstep::simulation {
namespace {

using at::Tensor;
using c10d::ReduceOp;
using Bytes = Network::Bytes;
using Inputs = Member::Inputs;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Bytes bytes_of(const Tensor& tensor) {
  const auto* const data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  return {data, data + tensor.nbytes()};
}

// In a collective call all bytes must be as many as expected: Gloo ends the process otherwise.
bool fits(const Bytes& bytes, size_t expected) {
  if (bytes.size() == expected) return true;
  network().wrongs.push_back("calls of unequal sizes met: " + std::to_string(bytes.size()) + " and " +
                             std::to_string(expected) + " bytes");
  return false;
}

template <class Number>
void reduce_numbers(Number* to, const Inputs& inputs, int64_t count, ReduceOp::RedOpType op) {
  for (int64_t i = 0; i < count; ++i) {
    Number result{};
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      Number value;
      std::memcpy(&value, inputs[rank].data() + i * sizeof value, sizeof value);
      if (rank == 0) {
        result = value;
      } else if (op == ReduceOp::SUM) {
        result = static_cast<Number>(result + value);
      } else if (op == ReduceOp::MAX) {
        result = std::max(result, value);
      } else if (op == ReduceOp::MIN) {
        result = std::min(result, value);
      } else {
        throw std::runtime_error("the simulated group has no such reduction");
      }
    }
    to[i] = result;
  }
}

void reduce_all(const Tensor& to, const Inputs& inputs, ReduceOp::RedOpType op) {
  for (const auto& input : inputs) {
    if (!fits(input, to.nbytes())) return;
  }
  void* const data = to.mutable_data_ptr();
  switch (to.scalar_type()) {
    case at::kFloat:
      return reduce_numbers(static_cast<float*>(data), inputs, to.numel(), op);
    case at::kDouble:
      return reduce_numbers(static_cast<double*>(data), inputs, to.numel(), op);
    case at::kInt:
      return reduce_numbers(static_cast<int32_t*>(data), inputs, to.numel(), op);
    case at::kLong:
      return reduce_numbers(static_cast<int64_t*>(data), inputs, to.numel(), op);
    default:
      throw std::runtime_error("the simulated group reduces no such numbers");
  }
}

class Group : public c10d::Backend {
 public:
  explicit Group(std::shared_ptr<Member> member) : Backend(member->rank, member->size), member_(std::move(member)) {}

  // Waits for the calls that are open, as c10d's Gloo does.
  ~Group() override {
    while (!member_->is_idle()) network().scheduler.wait(member_.get(), kNever);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void use_tag(uint32_t tag) { tag_ = tag; }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return call(Inputs(size_), [](Inputs&) {});
  }

  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const Tensor tensor = tensors.at(0);
    const ReduceOp::RedOpType op = options.reduceOp;
    return call(Inputs(size_, bytes_of(tensor)), [tensor, op](Inputs& inputs) { reduce_all(tensor, inputs, op); });
  }

  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor tensor = tensors.at(0);
    const auto root = static_cast<size_t>(options.rootRank);
    const bool sends = rank_ == options.rootRank;
    const auto finish = [tensor, root](Inputs& inputs) {
      if (!fits(inputs[root], tensor.nbytes())) return;
      std::memcpy(tensor.mutable_data_ptr(), inputs[root].data(), inputs[root].size());
    };
    return call(sends ? Inputs(size_, bytes_of(tensor)) : Inputs(size_), finish, static_cast<int>(root));
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return call(Inputs(size_, bytes_of(input)), [output, part = input.nbytes()](Inputs& inputs) {
      auto* to = static_cast<uint8_t*>(output.mutable_data_ptr());
      for (const auto& from : inputs) {
        if (!fits(from, part)) return;
        to = std::copy(from.begin(), from.end(), to);
      }
    });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    Inputs to;
    const Bytes all = bytes_of(input);
    auto begin = all.begin();
    for (const int64_t size : input_sizes) {
      to.emplace_back(begin, begin + size);
      begin += size;
    }
    return call(std::move(to), [output, sizes = output_sizes](Inputs& inputs) {
      auto* place = static_cast<uint8_t*>(output.mutable_data_ptr());
      for (size_t rank = 0; rank < inputs.size(); ++rank) {
        if (!fits(inputs[rank], sizes[rank])) return;
        place = std::copy(inputs[rank].begin(), inputs[rank].end(), place);
      }
    });
  }

  WorkPtr send(std::vector<Tensor>& tensors, int destination, int tag) override {
    return member_->send(destination, static_cast<uint32_t>(tag), bytes_of(tensors.at(0)));
  }

  WorkPtr recv(std::vector<Tensor>& tensors, int source, int tag) override {
    return member_->receive(source, static_cast<uint32_t>(tag), [to = tensors.at(0)](const Bytes& bytes) {
      if (fits(bytes, to.nbytes())) std::memcpy(to.mutable_data_ptr(), bytes.data(), bytes.size());
    });
  }

 private:
  WorkPtr call(Inputs to, std::function<void(Inputs&)> finish, int root = -1) {
    return member_->call(tag_++, std::move(to), std::move(finish), root);
  }

  const std::shared_ptr<Member> member_;
  uint32_t tag_ = 0;
};

// Connects as Gloo does: each leaves its address in the store, and then waits for each other one. A process that is
// gone by then refuses, or Gloo waits until its timeout.
void connect(Member& member, const comm::GroupPlace& place) {
  Scheduler& scheduler = network().scheduler;
  const Time deadline = scheduler.now() + std::chrono::nanoseconds(place.timeout).count();
  place.store->set(std::to_string(place.rank), std::to_string(member.number));
  std::vector<int> numbers;
  for (int rank = 0; rank < place.size; ++rank) {
    const std::string key = std::to_string(rank);
    place.store->wait({key}, place.timeout);
    numbers.push_back(std::stoi(place.store->get_to_str(key)));
  }
  member.connect(numbers);
  for (const int number : numbers) {
    const Network::Endpoint* other = network().endpoint(number);
    if (other == nullptr || !other->process.lives()) {
      if (scheduler.one_in(2)) scheduler.sleep(deadline - scheduler.now());
      throw std::runtime_error("connect: connection refused");
    }
    Process& there = other->process;
    if (&there == &member.process) continue;
    scheduler.wait(nullptr, network().arrival(member.process, there));
    scheduler.wait(nullptr, std::max(scheduler.now(), there.stopped_until));
    scheduler.wait(nullptr, network().arrival(there, member.process));
    if (there.lives()) continue;
    if (scheduler.one_in(2)) scheduler.sleep(deadline - scheduler.now());
    throw std::runtime_error("connect: connection reset");
  }
}

}  // namespace
}  // namespace lockstep::simulation

namespace lockstep::comm {

GroupMember make_gloo_group(const GroupPlace& place, const std::string&) {
  using namespace lockstep::simulation;
  auto& process = *Scheduler::this_thread()->process;
  const auto member = std::make_shared<Member>(process, place.rank, place.size);
  connect(*member, place);
  const auto group = c10::make_intrusive<Group>(member);
  const auto close = [member] {
    network().scheduler.sleep(kMillisecond);
    member->close();
  };
  return {group, close, [group](uint32_t tag) { group->use_tag(tag); }};
}

}  // namespace lockstep::comm
