#include "server/parameter_server_rank.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <lockstep/error.hpp>

#include "equal_modules.hpp"
#include "exception_text.hpp"
#include "of_all_ranks.hpp"
#include "part_weight.hpp"
#include "shared_text.hpp"

#include <chrono>
#include <exception>
#include <set>

namespace lockstep {

using server::KeyShard;
using server::Push;
using server::Request;

namespace {

// A worker that is done waits for those that still train, however long that takes. That somebody trains at all is
// watched by the servers, whose waits have the run's timeout, and whose end ends this wait.
constexpr std::chrono::hours kAsLongAsTheOthersTrain{24 * 365};

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

}  // namespace

ParameterServerRank::ParameterServerRank(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                                         const ParameterServer::MakeOptimizer& make_optimizer,
                                         const ParameterServerOptions& options)
    : module_(std::move(module)), rank_(rank.split(0)), options_(options) {
  check_options();
  make_modules_equal(*module_, rank_, "ParameterServer");
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module_->named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;  // of two names one counts
    if (item.value().requires_grad()) {
      parameters_.push_back(item.value());
    } else {
      frozen_.emplace_back(item.key(), item.value());
    }
  }
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
  if (server_) {
    server_->serve();
  } else {
    work(body);
  }
  return meet();
}

void ParameterServerRank::work(const ParameterServer::Body& body) {
  bytes_pushed_ = 0;
  failure_.reset();
  std::exception_ptr exception;
  try {
    Worker worker(*this);
    body(worker);
  } catch (...) {
    if (options_.consistency == Consistency::synchronous) throw;
    exception = std::current_exception();
    failure_ = exception_text(exception);
  }
  try {
    ask(server::kDone);
  } catch (...) {  // it was the run that failed, and not the body
    if (exception) std::rethrow_exception(exception);
    throw;
  }
  wait_for_the_end();
}

void ParameterServerRank::wait_for_the_end() {
  for (int server = 0; server < options_.servers; ++server) {
    std::vector<at::Tensor> nothing{at::empty({1}, pulled_[0].options())};
    rank_.backend().recv(nothing, rank_of(server), server::kEndTag)->wait(kAsLongAsTheOthersTrain);
  }
}

// All ranks are done: everybody learns what the servers have, and who was lost.
std::vector<LostWorker> ParameterServerRank::meet() {
  for (int server = 0; server < options_.servers; ++server) {
    const at::Tensor bytes = server_ ? rank_of(server) == rank_.index()
                                           ? server_->bytes()
                                           : at::empty({shards_[server].bytes}, server_->bytes().options())
                                     : pulled_[server];
    rank_.broadcast(bytes, rank_of(server));
    take_parameters(server, bytes);
  }
  const at::Tensor failed = of_all_ranks(rank_, {failure_ ? 1 : 0});
  std::vector<LostWorker> lost;
  for (int worker = 0; worker < workers(); ++worker) {
    if (failed[worker].item<int64_t>() == 0) continue;
    lost.push_back({worker, shared_text(failure_.value_or(""), rank_, worker)});
  }
  if (static_cast<int>(lost.size()) == workers()) {
    throw Error("ParameterServer: every worker failed. Worker 0: " + lost[0].reason);
  }
  return lost;
}

void ParameterServerRank::take_parameters(int server, const at::Tensor& bytes) {
  const c10::NoGradGuard no_grad;
  for (const auto& piece : shards_[server].pieces) {
    server::piece_of_parameter(parameters_[piece.parameter], piece).copy_(server::piece_of_shard(bytes, piece));
  }
}

double ParameterServerRank::weight_of(const Batch& batch) const {
  return part_weight(batch.size(), batch.global_size, workers(), "ParameterServer");
}

std::vector<at::Tensor> ParameterServerRank::gradients() const {
  for (const auto& [name, parameter] : frozen_) {
    if (!parameter.requires_grad()) continue;
    throw Error(rank_.name() + ": ParameterServer: " + name +
                " needed no gradient when this ParameterServer was made, and needs one now, which would not be pushed. "
                "Build the ParameterServer after requires_grad_(true)");
  }
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters_) {
    const at::Tensor gradient = parameter.grad();
    gradients.push_back(gradient.defined() && gradient.is_sparse() ? gradient.coalesce() : gradient);
  }
  return gradients;
}

// All that is asked of all servers is on its way before the first answer is waited for, so that servers work at the
// same time.
void ParameterServerRank::ask(int64_t asks) {
  const c10::NoGradGuard no_grad;
  const auto gradients = asks & server::kPush ? this->gradients() : std::vector<at::Tensor>();
  c10d::Backend& backend = rank_.backend();
  Works works;
  for (int server = 0; server < options_.servers; ++server) {
    const KeyShard& shard = shards_[server];
    Request request{asks};
    std::vector<at::Tensor> payload(1);
    if (asks & server::kPush) {
      Push push = pack(shard, gradients);
      request.rows = std::move(push.rows);
      payload[0] = push.payload;
    }
    std::vector<at::Tensor> message{request.to_tensor(shard.pieces.size()).to(rank_.device())};
    works.push_back(backend.send(message, rank_of(server), server::kRequestTag));
    if (payload[0].defined() && payload[0].numel() > 0) {
      works.push_back(backend.send(payload, rank_of(server), server::kPayloadTag));
      bytes_pushed_ += payload[0].numel();
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
