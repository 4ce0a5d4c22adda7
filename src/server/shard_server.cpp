#include "shard_server.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "comm/reduction.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace lockstep::server {

ShardServer::ShardServer(Rank& rank, int workers, KeyShard shard, const std::vector<at::Tensor>& parameters,
                         const ParameterServer::MakeOptimizer& make_optimizer, const ParameterServerOptions& options)
    : rank_(rank), shard_(std::move(shard)), options_(options), workers_(workers) {
  bytes_ = at::zeros({shard_.bytes}, at::TensorOptions(rank_.device()).dtype(at::kByte));
  for (const auto& slice : shard_.slices) {
    at::Tensor values = slice_in_shard(bytes_, slice).detach();
    values.copy_(slice_of_parameter(parameters[slice.parameter], slice));
    slices_.push_back(values.requires_grad_());
  }
  optimizer_ = make_optimizer(slices_);
  if (!optimizer_) throw Error(rank_.name() + ": ParameterServer: make_optimizer gave no optimizer");
}

void ShardServer::serve() {
  const c10::NoGradGuard no_grad;
  rounds_ = 0;
  std::fill(workers_.begin(), workers_.end(), Of());
  while (std::any_of(workers_.begin(), workers_.end(), [](auto& worker) { return !worker.done; })) {
    Request request;
    const int number = receive(request);
    Of& worker = workers_[number];
    if (request.asks & kPush) take_push(number, request.rows);
    if (request.asks & kPull) worker.wants = true;
    if (request.asks & kDone) worker.done = true;
    if (options_.consistency == Consistency::synchronous) update_in_rounds();
    answer();
  }
  std::vector<at::Tensor> nothing{at::zeros({1}, bytes_.options())};
  for (size_t worker = 0; worker < workers_.size(); ++worker) {
    rank_.backend().send(nothing, static_cast<int>(worker), kEndTag)->wait();
  }
}

int ShardServer::receive(Request& request) {
  std::vector<at::Tensor> message{Request::empty(shard_.slices.size()).to(rank_.device())};
  const auto work = rank_.backend().recvAnysource(message, kRequestTag);
  work->wait();
  request = Request::from_tensor(message[0].cpu());
  return work->sourceRank();
}

void ShardServer::take_push(int number, const std::vector<int64_t>& rows) {
  Of& worker = workers_[number];
  std::vector<at::Tensor> payload{at::empty({payload_bytes(shard_, rows)}, bytes_.options())};
  if (payload[0].numel() > 0) rank_.backend().recv(payload, number, kPayloadTag)->wait();
  Push push{rows, payload[0]};
  ++worker.pushes;
  if (options_.consistency != Consistency::synchronous) return update(unpack(shard_, push));
  worker.waiting.push_back(std::move(push));
}

void ShardServer::update_in_rounds() {
  check_equal_pushes();
  while (std::all_of(workers_.begin(), workers_.end(), [](auto& worker) { return !worker.waiting.empty(); })) {
    std::vector<Push> round;
    std::vector<std::vector<at::Tensor>> by_slice(shard_.slices.size());
    for (auto& worker : workers_) {
      round.push_back(std::move(worker.waiting.front()));
      worker.waiting.pop_front();
      const auto gradients = unpack(shard_, round.back());
      for (size_t i = 0; i < gradients.size(); ++i) by_slice[i].push_back(gradients[i]);
    }
    std::vector<at::Tensor> averages;
    for (size_t i = 0; i < by_slice.size(); ++i) averages.push_back(average(by_slice[i], shard_.slices[i]));
    update(averages);
    ++rounds_;
  }
}

// Averages in the order of the workers, not of arrival, adding as an allreduce does. Sparse gradients stay sparse if
// all are sparse. If no worker has one, the average is undefined, and the optimizer leaves the parameter alone.
at::Tensor ShardServer::average(const std::vector<at::Tensor>& gradients, const Slice& slice) const {
  if (std::none_of(gradients.begin(), gradients.end(), [](auto& g) { return g.defined(); })) return {};
  const auto count = static_cast<int>(gradients.size());
  if (std::all_of(gradients.begin(), gradients.end(), [](auto& g) { return g.defined() && g.is_sparse(); })) {
    at::Tensor sum = gradients[0];
    for (int worker = 1; worker < count; ++worker) sum = sum.add(gradients[worker]);
    return sum.div(count);
  }
  std::vector<at::Tensor> dense;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) {
      dense.push_back(at::zeros(slice.sizes, bytes_.options().dtype(slice.type)));
    } else {
      dense.push_back(gradient.is_sparse() ? gradient.to_dense() : gradient);
    }
  }
  c10::SmallVector<const at::Tensor*, 8> values;
  for (const auto& gradient : dense) values.push_back(&gradient);
  const at::Tensor* const target = &dense[0];
  comm::reduce(values, c10d::ReduceOp::AVG, target, {0, target->numel()});
  return dense[0];
}

void ShardServer::update(const std::vector<at::Tensor>& gradients) {
  for (size_t i = 0; i < gradients.size(); ++i) slices_[i].mutable_grad() = gradients[i];
  optimizer_->step();
  for (auto& slice : slices_) slice.mutable_grad() = at::Tensor();
}

void ShardServer::check_equal_pushes() const {
  const auto fewer = [](const Of& a, const Of& b) { return a.pushes < b.pushes; };
  const auto most = std::max_element(workers_.begin(), workers_.end(), fewer);
  for (auto worker = workers_.begin(); worker != workers_.end(); ++worker) {
    if (!worker->done || worker->pushes == most->pushes) continue;
    throw Error(rank_.name() + ": ParameterServer: worker " + std::to_string(worker - workers_.begin()) +
                    " ended after " + std::to_string(worker->pushes) + " pushes, and worker " +
                    std::to_string(most - workers_.begin()) + " made " + std::to_string(most->pushes) +
                    ". In synchronous mode all workers must make equally many; Consistency::asynchronous does without",
                {Error::difference});
  }
}

void ShardServer::answer() {
  for (size_t number = 0; number < workers_.size(); ++number) {
    Of& worker = workers_[number];
    if (!worker.wants || !may_have(worker)) continue;
    std::vector<at::Tensor> reply{bytes_};
    worker.wants = false;
    rank_.backend().send(reply, static_cast<int>(number), kReplyTag)->wait();
  }
}

bool ShardServer::may_have(const Of& worker) const {
  if (options_.consistency == Consistency::asynchronous) return true;
  if (options_.consistency == Consistency::synchronous) return rounds_ >= worker.pushes;
  int64_t slowest = std::numeric_limits<int64_t>::max();
  for (const auto& other : workers_) {
    if (!other.done) slowest = std::min(slowest, other.pushes);
  }
  return worker.pushes <= slowest + options_.staleness;
}

}  // namespace lockstep::server
