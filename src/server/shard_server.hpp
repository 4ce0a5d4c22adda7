// ShardServer: the server's side of a ParameterServer. It runs on the rank's own thread, and takes one request after
// the other, in the order of arrival.
#pragma once

#include <lockstep/server/parameter_server.hpp>

#include "key_shards.hpp"
#include "push.hpp"

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace lockstep::server {

class ShardServer {
 public:
  // Workers are ranks 0 … workers - 1 of `rank`. The shard begins with the values of `parameters`.
  ShardServer(Rank& rank, int workers, KeyShard shard, const std::vector<at::Tensor>& parameters,
              const ParameterServer::MakeOptimizer& make_optimizer, const ParameterServerOptions& options);

  // Serves until all workers are done, and tells them so. Throws Error as ParameterServer::train does.
  void serve();

  const at::Tensor& bytes() const { return bytes_; }  // the shard's parameters
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  struct Of {  // the state of one worker, in this serve()
    int64_t pushes = 0;
    bool wants = false;  // the worker waits for the parameters
    bool done = false;
    std::deque<Push> waiting = {};  // pushes that wait for those of other workers
  };

  int receive(Request& request);  // returns the worker
  void take_push(int worker, const std::vector<int64_t>& rows);
  void update_in_rounds();  // synchronous mode: updates as often as all workers have pushed
  void update(const std::vector<at::Tensor>& gradients);  // makes one step of the optimizer; gradients by slice
  at::Tensor average(const std::vector<at::Tensor>& gradients, const Slice& slice) const;  // gradients: one per worker
  void check_equal_pushes() const;
  void answer();
  bool may_have(const Of& worker) const;  // tells whether this worker may be sent the current parameters

  Rank rank_;
  const KeyShard shard_;
  const ParameterServerOptions options_;
  at::Tensor bytes_;
  std::vector<at::Tensor> slices_;  // views of bytes_
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Of> workers_;
  int64_t rounds_ = 0;  // rounds of this serve(), in synchronous mode
};

}  // namespace lockstep::server
