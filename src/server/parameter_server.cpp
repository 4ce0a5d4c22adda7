#include <lockstep/server/parameter_server.hpp>

#include "nn/weighed_backward.hpp"
#include "parameter_server_rank.hpp"

namespace lockstep {

ParameterServer::ParameterServer(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                                 const MakeOptimizer& make_optimizer, const ParameterServerOptions& options)
    : rank_(std::make_shared<ParameterServerRank>(std::move(module), rank, make_optimizer, options)) {}

std::vector<LostWorker> ParameterServer::train(const Body& body) {
  return rank_->train(body);
}

bool ParameterServer::is_server() const {
  return rank_->server() != nullptr;
}

int ParameterServer::workers() const {
  return rank_->workers();
}

torch::optim::Optimizer* ParameterServer::optimizer() {
  return is_server() ? &rank_->server()->optimizer() : nullptr;
}

int Worker::index() const {
  return rank_->rank().index();
}

int Worker::count() const {
  return rank_->workers();
}

c10::Device Worker::device() const {
  return rank_->rank().device();
}

SampleScope Worker::samples(const Batch& batch) {
  return SampleScope(rank_->places().of(batch));
}

void Worker::backward(const at::Tensor& local_mean, const Batch& batch) {
  const double weight = rank_->weight_of(batch);
  rank_->check_targets(local_mean, batch);
  rank_->places().computed();
  if (batch.size() == 0) return;
  const WeighedBackward weighed(local_mean, weight, rank_->module());
  local_mean.backward(weighed.seed());
}

void Worker::push() {
  rank_->ask(server::kPush);
}

void Worker::pull() {
  rank_->ask(server::kPull);
}

void Worker::step() {
  rank_->ask(server::kPush | server::kPull);
}

int64_t Worker::bytes_pushed() const {
  return rank_->bytes_pushed();
}

}  // namespace lockstep
