#include "parameter_server_rank.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/dropout.hpp>

#include "base/exception_text.hpp"
#include "comm/peer_lost.hpp"
#include "data/latest_batch.hpp"
#include "data/part_weight.hpp"
#include "data_parallel/counted_targets.hpp"
#include "lost_workers.hpp"
#include "ranks/equal_modules.hpp"
#include "ranks/gather.hpp"
#include "ranks/loss_tolerance.hpp"
#include "ranks/shared_seed.hpp"

#include <chrono>
#include <exception>
#include <optional>
#include <utility>

namespace lockstep {

using server::KeyShard;
using server::Push;
using server::Request;

namespace {

// A worker that is done waits for those that still train, however long that takes. The servers watch that somebody
// trains: their waits have the run's timeout, and if they end, so does this wait.
constexpr std::chrono::hours kAsLongAsTheOthersTrain{24 * 365};

using server::Works;

std::string reason_of(const std::exception_ptr& exception) {
  const std::string text = exception_text(exception);
  return text.empty() ? "an exception without a text" : text;
}

template <class Call>
void unless_lost(const Call& call) {
  try {
    call();
  } catch (const comm::PeerLost&) {
  }
}

}  // namespace

ParameterServerRank::ParameterServerRank(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                                         const ParameterServer::MakeOptimizer& make_optimizer,
                                         const ParameterServerOptions& options)
    : module_(std::move(module)),
      rank_(rank.group(0)),
      options_(options),
      places_(rank.seed(), rank_.index(), workers()) {
  if (!module_) throw Error(rank_.name() + ": ParameterServer: the module is null; build it first");
  check_options();
  name_dropouts(*module_);
  make_modules_equal(*module_, rank_, "ParameterServer");
  trained_ = TrainedParameters(*module_);
  for (const auto& [name, parameter] : trained_.all()) parameters_.push_back(parameter);
  shards_ = server::shard_keys(parameters_, options_.servers, options_.piece_bytes);
  for (const auto& shard : shards_) {
    if (!shard.pieces.empty()) continue;
    throw Error("ParameterServer: " + std::to_string(options_.servers) + " servers, but the module's parameters make " +
                "fewer pieces than that. Lower servers or piece_bytes");
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
      rank_, {options_.servers, static_cast<int64_t>(options_.consistency), options_.staleness, options_.piece_bytes});
  for (int other = 0; other < rank_.world_size(); ++other) {
    if (all[other].equal(all[rank_.index()])) continue;
    throw Error("ParameterServer: the options of ranks " + std::to_string(rank_.index()) + " and " +
                std::to_string(other) +
                " differ (servers, consistency, staleness, piece_bytes). Give all ranks the same");
  }
  if (options_.servers < 1 || workers() < 1) {
    throw Error("ParameterServer: " + std::to_string(options_.servers) + " servers of " +
                std::to_string(rank_.world_size()) + " ranks; there must be at least one server and one worker");
  }
  if (options_.staleness < 0 || options_.piece_bytes < 1) {
    throw Error("ParameterServer: staleness is " + std::to_string(options_.staleness) + " and piece_bytes is " +
                std::to_string(options_.piece_bytes) + "; they must be at least 0 and 1");
  }
  if (const auto backend = rank_.backend().getBackendName(); backend != "lockstep") {
    throw Error("ParameterServer: servers receive from any rank, which " + backend +
                " cannot. Use CPU ranks, or GPU ranks of one process that share a GPU");
  }
}

std::vector<LostWorker> ParameterServerRank::train(const ParameterServer::Body& body) {
  auto lost = server_ ? serve() : work(body);
  if (static_cast<int>(lost.size()) == workers()) {
    throw Error("ParameterServer: every worker failed. Worker 0: " + lost[0].reason);
  }
  return lost;
}

std::vector<LostWorker> ParameterServerRank::work(const ParameterServer::Body& body) {
  bytes_pushed_ = 0;
  training_ = true;
  std::optional<comm::LossTolerance> tolerance;
  if (options_.consistency != Consistency::synchronous) tolerance.emplace(rank_);
  std::exception_ptr exception;
  try {
    Worker worker(shared_from_this());
    body(worker);
  } catch (...) {
    if (!tolerance) throw;
    exception = std::current_exception();
  }
  try {
    ask(server::kDone, exception ? reason_of(exception) : "");
  } catch (...) {  // it was the run that failed, and not the body
    if (exception) std::rethrow_exception(exception);
    throw;
  }
  training_ = false;
  receive_parameters();
  if (tolerance) tolerance->end();
  std::vector<at::Tensor> here{at::ones({1}, at::TensorOptions(rank_.device()).dtype(at::kByte))};
  rank_.backend().send(here, rank_of(0), server::kHereTag)->wait();
  return server::receive_lost(rank_, rank_of(0));
}

void ParameterServerRank::receive_parameters() {
  Works works;
  for (int server = 0; server < options_.servers; ++server) {
    std::vector<at::Tensor> bytes{pulled_[server]};
    works.push_back(rank_.backend().recv(bytes, rank_of(server), server::kEndTag));
  }
  for (const auto& work : works) work->wait(kAsLongAsTheOthersTrain);
  for (int server = 0; server < options_.servers; ++server) take_parameters(server, pulled_[server]);
}

// Tells the others everything in messages, because some of them may not live to get them.
std::vector<LostWorker> ParameterServerRank::serve() {
  const auto lost = server_->serve();
  exchange_parameters();
  if (rank_.index() == rank_of(0)) return settle_lost(lost);
  for (const auto& work : server::send_lost(rank_, lost, rank_of(0))) work->wait();
  return server::receive_lost(rank_, rank_of(0));
}

void ParameterServerRank::exchange_parameters() {
  Works works;
  for (int other = 0; other < rank_.world_size(); ++other) {
    if (other == rank_.index()) continue;
    unless_lost([&] {
      std::vector<at::Tensor> bytes{server_->bytes()};
      works.push_back(rank_.backend().send(bytes, other, server::kEndTag));
    });
  }
  std::vector<at::Tensor> shards;
  for (int server = 0; server < options_.servers; ++server) {
    const bool is_own = rank_of(server) == rank_.index();
    shards.push_back(is_own ? server_->bytes() : at::empty({shards_[server].bytes}, server_->bytes().options()));
    std::vector<at::Tensor> bytes{shards.back()};
    if (!is_own) works.push_back(rank_.backend().recv(bytes, rank_of(server), server::kEndTag));
  }
  for (const auto& work : works) unless_lost([&] { work->wait(); });
  for (int server = 0; server < options_.servers; ++server) take_parameters(server, shards[server]);
}

// The first server says who was lost, once each worker is lost or can no longer be.
std::vector<LostWorker> ParameterServerRank::settle_lost(const std::vector<LostWorker>& known) {
  auto lost = known;
  for (int server = 1; server < options_.servers; ++server) {
    lost = server::merged(lost, server::receive_lost(rank_, rank_of(server)));
  }
  std::vector<LostWorker> gone;
  for (int worker = 0; worker < workers(); ++worker) {
    unless_lost([&] {
      std::vector<at::Tensor> here{at::empty({1}, server_->bytes().options())};
      rank_.backend().recv(here, worker, server::kHereTag)->wait();
    });
    if (auto reason = comm::why_lost(rank_, worker); !reason.empty()) gone.push_back({worker, std::move(reason)});
  }
  lost = server::as_sent(server::merged(lost, gone));
  Works works;
  for (int other = 0; other < rank_.world_size(); ++other) {
    if (other == rank_.index()) continue;
    unless_lost([&] {
      for (auto& work : server::send_lost(rank_, lost, other)) works.push_back(std::move(work));
    });
  }
  for (const auto& work : works) unless_lost([&] { work->wait(); });
  return lost;
}

void ParameterServerRank::take_parameters(int server, const at::Tensor& bytes) {
  const c10::NoGradGuard no_grad;
  for (const auto& piece : shards_[server].pieces) {
    server::piece_of_parameter(parameters_[piece.parameter], piece).copy_(server::piece_of_shard(bytes, piece));
  }
}

double ParameterServerRank::weight_of(const Batch& batch) const {
  if (batch.grain > 0) {
    throw Error(rank_.name() +
                ": ParameterServer: the batch has a grain, but a server adds gradients up in an order that depends on "
                "the workers. Leave out BatchOptions::grain, or take a DataParallel");
  }
  const auto latest = latest_batch();  // a worker may train on whole batches, or on parts of other sizes
  if (latest && batch.mark != 0 && latest->global == batch.global_size && latest->shards == rank_.world_size()) {
    throw Error(rank_.name() + ": ParameterServer: the batch was cut for all " + std::to_string(latest->shards) +
                " ranks, of which " + std::to_string(options_.servers) +
                " are servers, so the servers' parts would never be trained. Give batches() the worker in the place "
                "of the rank: batches(…, worker)");
  }
  return part_weight(batch.size(), batch.global_size, workers(), "ParameterServer");
}

// A part that is the whole batch has the mean that one device has.
void ParameterServerRank::check_targets(const at::Tensor& local_mean, const Batch& batch) {
  if (batch.size() == 0 || batch.size() == batch.global_size) return;
  if (!rank_.device().is_cpu() && ++targets_checked_ > kChecksOnGpu) return;
  check_counted_targets(local_mean, batch.size(), rank_.name() + ": ParameterServer",
                        "as in worker.backward(F::cross_entropy(y_hat, batch.y, with that reduction) / batch.size(), "
                        "batch)");
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
void ParameterServerRank::ask(int64_t asks, const std::string& reason) {
  if (!training_) {
    throw Error(rank_.name() + ": ParameterServer: a worker's push() and pull() end with train(), whose function it " +
                "was given to; call them there");
  }
  const c10::NoGradGuard no_grad;
  const auto gradients = asks & server::kPush ? this->gradients() : std::vector<at::Tensor>();
  c10d::Backend& backend = rank_.backend();
  warn_of_shared_seed(rank_);
  if (asks & server::kPush) places_.set_steps_done(places_.steps_done() + 1);
  Works works;
  for (int server = 0; server < options_.servers; ++server) {
    const KeyShard& shard = shards_[server];
    Request request{asks};
    std::vector<at::Tensor> payload(1);
    if (asks & server::kPush) {
      Push push = pack(shard, gradients);
      request.rows = std::move(push.rows);
      payload[0] = push.payload;
      bytes_pushed_ += push.payload.numel();
    } else if (!reason.empty()) {
      payload[0] = bytes_of_text(reason).to(rank_.device());
      request.reason_bytes = payload[0].numel();
    }
    std::vector<at::Tensor> message{request.to_tensor(shard.pieces.size()).to(rank_.device())};
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

}  // namespace lockstep
