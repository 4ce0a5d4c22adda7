#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/server/parameter_server.hpp>

#include <chrono>
#include <exception>

#include "base/exception_text.hpp"
#include "data/latest_batch.hpp"
#include "data/part_weight.hpp"
#include "data_parallel/counted_batches.hpp"
#include "data_parallel/counted_targets.hpp"
#include "data_parallel/criterion_check.hpp"
#include "key_shards.hpp"
#include "nn/random_layers.hpp"
#include "nn/sample_places.hpp"
#include "nn/weighed_backward.hpp"
#include "ranks/equal_modules.hpp"
#include "ranks/gather.hpp"
#include "ranks/shared_generator.hpp"
#include "ranks/trained_parameters.hpp"
#include "shard_server.hpp"

namespace lockstep {

using server::KeyShard;
using server::Push;
using server::Request;

namespace {

// A worker that is done waits for the others' training, however long it takes. The servers watch that somebody trains:
// their waits have the run's timeout, and if a server fails, so does this wait.
constexpr std::chrono::hours kAsLongAsTheOthersTrain{24 * 365};

std::string reason_of(const std::exception_ptr& exception) {
  const std::string text = exception_text(exception);
  return text.empty() ? "an exception without a text" : text;
}

}  // namespace

// ParameterServerRank is the state of a ParameterServer's rank, and the worker's side of the messages. ShardServer has
// the server's side.
class ParameterServerRank : public std::enable_shared_from_this<ParameterServerRank> {
 public:
  ParameterServerRank(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                      const ParameterServer::MakeOptimizer& make_optimizer, const ParameterServerOptions& options);

  std::vector<LostWorker> train(const ParameterServer::Body& body);

  // Sends a worker's request to all servers, and returns when all have answered. A push brings the gradients with it.
  // Throws Error outside of train().
  void ask(int64_t asks);
  void backward(const at::Tensor& local_mean, const Batch& batch);  // see Worker
  void backward(const at::Tensor& y_hat, const Criterion& criterion, const Batch& batch);

  const Rank& rank() const { return rank_; }
  int workers() const { return rank_.world_size() - options_.servers; }
  server::ShardServer* server() { return server_.get(); }
  int64_t bytes_pushed() const { return bytes_pushed_; }
  SamplePlaces& places() { return places_; }

 private:
  void check_options();
  double weight_of(const Batch& batch) const;
  std::string work(const ParameterServer::Body& body);  // returns why the body failed, or ""
  void share_parameters();                              // takes the servers' parameters, at the end of a training
  std::vector<at::Tensor> gradients() const;
  void take_parameters(int server, const at::Tensor& bytes);
  int rank_of(int server) const { return workers() + server; }

  const std::shared_ptr<torch::nn::Module> module_;
  Rank rank_;   // has a group of its own, so that messages do not mix with the user's
  Rank peers_;  // the other workers, or on a server the other servers
  const ParameterServerOptions options_;
  CountedBatches counts_;  // counts over all workers, for MeanOvers
  CriterionCheck criteria_;
  SamplePlaces places_;  // the places of this worker's samples
  TrainedParameters trained_;
  std::vector<at::Tensor> parameters_;           // the parameters of trained_
  std::vector<server::KeyShard> shards_;         // the shard of each server
  std::unique_ptr<server::ShardServer> server_;  // null on workers
  std::vector<at::Tensor> pulled_;               // each server's shard as bytes; empty on servers
  int64_t bytes_pushed_ = 0;
  bool training_ = false;    // the servers serve
  int targets_checked_ = 0;  // the number of checked means, on a GPU
};

ParameterServerRank::ParameterServerRank(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                                         const ParameterServer::MakeOptimizer& make_optimizer,
                                         const ParameterServerOptions& options)
    : module_(std::move(module)),
      rank_(rank.group(0)),
      peers_(rank_.group(rank_.index() < rank_.world_size() - options.servers ? 0 : 1)),
      options_(options),
      counts_(peers_),
      criteria_(peers_),
      places_(rank.seed(), rank_.index(), workers()) {
  if (!module_) throw Error(rank_.name() + ": ParameterServer: the module is null; build it first");
  check_options();
  name_dropouts(*module_);
  make_modules_equal(*module_, rank_, "ParameterServer");
  trained_ = TrainedParameters(*module_);
  for (const auto& [name, parameter] : trained_.all()) parameters_.push_back(parameter);
  shards_ = server::shard_keys(parameters_, options_.servers, options_.slice_bytes);
  for (const auto& shard : shards_) {
    if (!shard.slices.empty()) continue;
    throw Error("ParameterServer: " + std::to_string(options_.servers) + " servers, but the module's parameters make " +
                "fewer slices than that. Lower servers or slice_bytes");
  }
  const int number = rank_.index() - workers();
  if (number >= 0) {
    const c10::NoGradGuard no_grad;
    server_ =
        std::make_unique<server::ShardServer>(rank_, workers(), shards_[number], parameters_, make_optimizer, options_);
    return;
  }
  for (const auto& shard : shards_) {
    pulled_.push_back(at::empty({shard.bytes}, at::TensorOptions(rank_.device()).dtype(at::kByte)));
  }
}

void ParameterServerRank::check_options() {
  const at::Tensor all = of_all_ranks(
      rank_, {options_.servers, static_cast<int64_t>(options_.consistency), options_.staleness, options_.slice_bytes});
  for (int other = 0; other < rank_.world_size(); ++other) {
    if (all[other].equal(all[rank_.index()])) continue;
    throw Error("ParameterServer: the options of ranks " + std::to_string(rank_.index()) + " and " +
                    std::to_string(other) +
                    " differ (servers, consistency, staleness, slice_bytes). Give all ranks the same",
                {Error::difference, {std::min(rank_.index(), other), std::max(rank_.index(), other)}});
  }
  if (options_.servers < 1 || workers() < 1) {
    throw Error("ParameterServer: " + std::to_string(options_.servers) + " servers of " +
                std::to_string(rank_.world_size()) + " ranks; there must be at least one server and one worker");
  }
  if (options_.staleness < 0 || options_.slice_bytes < 1) {
    throw Error("ParameterServer: staleness is " + std::to_string(options_.staleness) + " and slice_bytes is " +
                std::to_string(options_.slice_bytes) + "; they must be at least 0 and 1");
  }
  if (const auto backend = rank_.backend().getBackendName(); backend != "lockstep") {
    throw Error("ParameterServer: servers receive from any rank, which " + backend +
                " cannot. Use CPU ranks, or ranks of one process that share a GPU without NCCL");
  }
}

std::vector<LostWorker> ParameterServerRank::train(const ParameterServer::Body& body) {
  std::string failure;
  if (server_) {
    server_->serve();
  } else {
    failure = work(body);
  }
  share_parameters();
  const auto failures = texts_of_all_ranks(failure, rank_);
  std::vector<LostWorker> lost;
  for (int worker = 0; worker < workers(); ++worker) {
    if (!failures[worker].empty()) lost.push_back({worker, failures[worker]});
  }
  if (static_cast<int>(lost.size()) == workers()) {
    throw Error("ParameterServer: every worker failed. Worker 0: " + lost[0].reason, {Error::user_code});
  }
  return lost;
}

std::string ParameterServerRank::work(const ParameterServer::Body& body) {
  bytes_pushed_ = 0;
  training_ = true;
  std::exception_ptr exception;
  try {
    Worker worker(shared_from_this());
    body(worker);
  } catch (...) {
    if (options_.consistency == Consistency::synchronous) throw;
    exception = std::current_exception();
  }
  try {
    ask(server::kDone);
  } catch (...) {  // the run failed, not the body
    if (exception) std::rethrow_exception(exception);
    throw;
  }
  training_ = false;
  for (int server = 0; server < options_.servers; ++server) {
    std::vector<at::Tensor> nothing{at::empty({1}, pulled_[server].options())};
    rank_.backend().recv(nothing, rank_of(server), server::kEndTag)->wait(kAsLongAsTheOthersTrain);
  }
  return exception ? reason_of(exception) : "";
}

void ParameterServerRank::share_parameters() {
  for (int server = 0; server < options_.servers; ++server) {
    at::Tensor bytes = server_ ? at::empty({shards_[server].bytes}, server_->bytes().options()) : pulled_[server];
    if (rank_of(server) == rank_.index()) bytes = server_->bytes();
    rank_.broadcast(bytes, rank_of(server));
    take_parameters(server, bytes);
  }
}

void ParameterServerRank::take_parameters(int server, const at::Tensor& bytes) {
  const c10::NoGradGuard no_grad;
  for (const auto& slice : shards_[server].slices) {
    server::slice_of_parameter(parameters_[slice.parameter], slice).copy_(server::slice_in_shard(bytes, slice));
  }
}

double ParameterServerRank::weight_of(const Batch& batch) const {
  if (batch.grain > 0) {
    throw Error(rank_.name() +
                ": ParameterServer: the batch has a grain, but a server adds gradients up in an order that depends on "
                "the workers. Leave out BatchOptions::grain, or take a DataParallel");
  }
  const auto latest = latest_batch();  // workers may train on whole batches too, or on parts of other sizes
  if (latest && batch.mark != 0 && latest->global == batch.global_size && latest->partners == rank_.world_size()) {
    throw Error(rank_.name() + ": ParameterServer: the batch was cut for all " + std::to_string(latest->partners) +
                " ranks, of which " + std::to_string(options_.servers) +
                " are servers, so the servers' parts would never be trained. Give batches() the worker in the place "
                "of the rank: batches(…, worker)");
  }
  return part_weight(batch.size(), batch.global_size, workers(), "ParameterServer");
}

void ParameterServerRank::backward(const at::Tensor& local_mean, const Batch& batch) {
  const double weight = weight_of(batch);
  const bool is_part = batch.size() > 0 && batch.size() < batch.global_size;  // one device has the whole batch's mean
  if (is_part && (rank_.device().is_cpu() || ++targets_checked_ <= kChecksOnGpu)) {
    check_counted_targets(local_mean, batch.size(), rank_.name() + ": ParameterServer",
                          "Divide the sum (reduction torch::kSum) by a number that does not depend on the targets, as "
                          "in worker.backward(F::cross_entropy(y_hat, batch.y, with that reduction) / batch.size(), "
                          "batch)");
  }
  places_.computed();
  if (batch.size() == 0) return;
  const WeighedBackward weighed(local_mean, weight, *module_);
  local_mean.backward(weighed.seed());
}

void ParameterServerRank::backward(const at::Tensor& y_hat, const Criterion& criterion, const Batch& batch) {
  const bool counts = static_cast<bool>(criterion.of());
  if (counts && options_.consistency != Consistency::synchronous) {
    throw Error(rank_.name() +
                    ": ParameterServer: a MeanOver is a mean over the batches of all workers, and each push counts "
                    "alone here. Take Consistency::synchronous; or give backward() the mean of this worker's part",
                {.options = {"criterion", "consistency"}});
  }
  const Batch counted = counts ? counts_.counted(batch, criterion.of()) : batch;
  backward(batch.size() > 0 ? criteria_.loss(criterion, y_hat, counted) : at::Tensor(), batch);
}

std::vector<at::Tensor> ParameterServerRank::gradients() const {
  trained_.check(rank_, "ParameterServer", "would not be pushed");
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters_) {
    const at::Tensor gradient = parameter.grad();
    gradients.push_back(gradient.defined() && gradient.is_sparse() ? gradient.coalesce() : gradient);
  }
  return gradients;
}

// Sends the requests to all servers before it waits for the first answer, so that servers work at the same time.
void ParameterServerRank::ask(int64_t asks) {
  if (!training_) {
    throw Error(rank_.name() + ": ParameterServer: a worker's push() and pull() end with train(), whose function it " +
                "was given to; call them there");
  }
  const c10::NoGradGuard no_grad;
  const auto gradients = asks & server::kPush ? this->gradients() : std::vector<at::Tensor>();
  c10d::Backend& backend = rank_.backend();
  warn_of_shared_seed(rank_);
  if (asks & server::kPush) places_.set_steps_done(places_.steps_done() + 1);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int server = 0; server < options_.servers; ++server) {
    const KeyShard& shard = shards_[server];
    Request request{asks};
    std::vector<at::Tensor> payload(1);
    if (asks & server::kPush) {
      Push push = pack(shard, gradients);
      request.rows = std::move(push.rows);
      payload[0] = push.payload;
      bytes_pushed_ += push.payload.numel();
    }
    std::vector<at::Tensor> message{request.to_tensor(shard.slices.size()).to(rank_.device())};
    works.push_back(backend.send(message, rank_of(server), server::kRequestTag));
    if (payload[0].defined() && payload[0].numel() > 0) {
      works.push_back(backend.send(payload, rank_of(server), server::kPayloadTag));
    }
    if (asks & server::kPull) {
      std::vector<at::Tensor> reply{pulled_[server]};
      works.push_back(backend.recv(reply, rank_of(server), server::kReplyTag));
    }
  }
  for (const auto& work : works) work->wait();
  if (!(asks & server::kPull)) return;
  for (int server = 0; server < options_.servers; ++server) take_parameters(server, pulled_[server]);
}

// ---- The handles.

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
  rank_->backward(local_mean, batch);
}

void Worker::backward(const at::Tensor& y_hat, const Criterion& criterion, const Batch& batch) {
  rank_->backward(y_hat, criterion, batch);
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
