// ParameterServerRank: what a rank holds of a ParameterServer. It has the worker's side of the messages; ShardServer
// has the server's.
#pragma once

#include <lockstep/server/parameter_server.hpp>

#include "key_shards.hpp"
#include "models/sample_places.hpp"
#include "ranks/trained_parameters.hpp"
#include "request.hpp"
#include "shard_server.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class ParameterServerRank : public std::enable_shared_from_this<ParameterServerRank> {
 public:
  ParameterServerRank(std::shared_ptr<torch::nn::Module> module, Rank& rank,
                      const ParameterServer::MakeOptimizer& make_optimizer, const ParameterServerOptions& options);

  std::vector<LostWorker> train(const ParameterServer::Body& body);

  // Makes a worker's request to all servers, and returns when all have answered. A push brings the gradients with it. A
  // worker that is done may say in `reason` why it failed. Throws Error outside of train().
  void ask(int64_t asks, const std::string& reason = "");
  double weight_of(const Batch& batch) const;
  void check_targets(const at::Tensor& local_mean, const Batch& batch);  // see check_counted_targets()

  const Rank& rank() const { return rank_; }
  const torch::nn::Module& module() const { return *module_; }
  int workers() const { return rank_.world_size() - options_.servers; }
  server::ShardServer* server() { return server_.get(); }
  int64_t bytes_pushed() const { return bytes_pushed_; }
  SamplePlaces& places() { return places_; }

 private:
  void check_options();
  std::vector<LostWorker> work(const ParameterServer::Body& body);
  std::vector<LostWorker> serve();
  void receive_parameters();   // on a worker, when all are done
  void exchange_parameters();  // on a server
  std::vector<LostWorker> settle_lost(const std::vector<LostWorker>& known);
  std::vector<at::Tensor> gradients() const;
  void take_parameters(int server, const at::Tensor& bytes);
  int rank_of(int server) const { return workers() + server; }

  const std::shared_ptr<torch::nn::Module> module_;
  Rank rank_;  // in a group of its own, so that its messages and the user's do not mix
  const ParameterServerOptions options_;
  SamplePlaces places_;  // of this worker
  TrainedParameters trained_;
  std::vector<at::Tensor> parameters_;           // of these
  std::vector<server::KeyShard> shards_;         // by server
  std::unique_ptr<server::ShardServer> server_;  // null on workers
  std::vector<at::Tensor> pulled_;               // by server: its shard's bytes; on workers
  int64_t bytes_pushed_ = 0;
  bool training_ = false;    // the servers serve
  int targets_checked_ = 0;  // means, on a GPU
};

}  // namespace lockstep
