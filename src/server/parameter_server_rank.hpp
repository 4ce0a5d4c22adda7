// ParameterServerRank: the state of a ParameterServer's rank, and the worker's side of the messages. ShardServer has
// the server's side.
#pragma once

#include <lockstep/server/parameter_server.hpp>

#include "data_parallel/counted_batches.hpp"
#include "data_parallel/criterion_check.hpp"
#include "key_shards.hpp"
#include "nn/sample_places.hpp"
#include "ranks/trained_parameters.hpp"
#include "shard_server.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

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

}  // namespace lockstep
