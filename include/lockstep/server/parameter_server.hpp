// ParameterServer: some ranks of a run keep the parameters and update them. The others compute gradients (Li et al.,
// Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014).
//
// The last ranks are the servers. Parameters are cut along their first dimension into slices, which are spread over the
// servers by size. Each server has an optimizer for its slices. A worker pushes gradients and pulls parameters: one
// message each way per server and step. Use a ParameterServer from its rank's thread only. It works for ranks on the
// CPU, as threads or processes, and for ranks that share GPUs, but not over NCCL. Memory: a server keeps its slices
// beside the module, and in synchronous mode each worker's gradients of these slices.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

enum class Consistency {
  // A pull waits for the pushes of all workers. Their average, added in the order of the workers, is one update. So
  // training is the same as with DataParallel on the workers alone. Push equally often on all workers.
  synchronous,
  // Each push is an update of its own, applied in the order of arrival. A pull gets the parameters as they are.
  asynchronous,
  // Works as asynchronous, but a pull waits until the worker is at most ParameterServerOptions::staleness pushes ahead
  // of the slowest (stale synchronous parallel, Ho et al. 2013).
  bounded,
};

struct ParameterServerOptions {
  int servers = 1;  // the number of servers, which are the last ranks of the run; all others are workers
  Consistency consistency = Consistency::synchronous;
  int64_t staleness = 0;          // Consistency::bounded uses it: 0 or more
  int64_t slice_bytes = 1 << 20;  // the most bytes of a slice; a larger parameter is cut, between two of its rows
};

// Names a worker whose function failed, while the others went on.
struct LostWorker {
  int worker = 0;
  std::string reason;
};

class ParameterServerRank;  // the state of a rank, whatever the module's type is

// This is what a worker's function sees. Do not make collective calls on the run's Rank in the function, because the
// servers do not make them. Copies are the same worker. After train() its calls to servers throw Error.
class Worker {
 public:
  Worker(const Worker&) = default;  // a move is a copy too
  Worker& operator=(const Worker&) = default;

  int index() const;  // gives 0 … count() - 1
  int count() const;  // gives the number of workers
  c10::Device device() const;
  operator Batches::Partner() const { return {index(), count(), device()}; }  // lets batches() cut this worker's part

  // Open it around a forward whose module has Dropout layers (dropout.hpp), like DataParallel::samples: `const auto
  // scope = worker.samples(batch);`. A worker's step is the number of its pushes.
  [[nodiscard]] SampleScope samples(const Batch& batch);

  // Adds this worker's part of the gradients of the whole batch's mean loss to the parameters' gradients, which push()
  // sends. `local_mean` is the mean loss over batch.x. The mean counts for more if the part is larger than the others',
  // and is ignored if the part is empty. Throws Error for cross_entropy's mean over some of a part's targets alone
  // (ignore_index); on GPUs only the first three calls check this.
  void backward(const at::Tensor& local_mean, const Batch& batch);
  // Does the same for the loss criterion(y_hat, batch). In synchronous mode it may be a MeanOver: call it on all
  // workers then, also with an empty part, whose y_hat may be undefined. Throws Error for a MeanOver in the other
  // modes, where a push counts alone.
  void backward(const at::Tensor& y_hat, const Criterion& criterion, const Batch& batch);

  // Sends the parameters' gradients. A sparse gradient (an Embedding with sparse(true)) travels as its rows' numbers
  // and values. An undefined one does not travel. In synchronous mode it counts as zeros if another worker has a
  // gradient. If none has, the optimizer leaves the parameter alone, as on one device. Throws Error for a parameter
  // that is no longer frozen, but was so when the ParameterServer was made, and as Rank::allreduce does.
  void push();
  void pull();  // overwrites the parameters with the servers'
  void step();  // push() and pull() in one message to each server

  int64_t bytes_pushed() const;  // gives the bytes pushed so far in this ParameterServer::train

 private:
  friend class ParameterServerRank;
  explicit Worker(std::shared_ptr<ParameterServerRank> rank) : rank_(std::move(rank)) {}
  std::shared_ptr<ParameterServerRank> rank_;
};

class ParameterServer {
 public:
  // Makes a server's optimizer. It is called once on each server, with the server's slices. It may make any optimizer
  // of torch::optim that updates each element independently of the others (not LBFGS). Sparse pushes need one that
  // takes sparse gradients, such as SGD without momentum.
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
  using Body = std::function<void(Worker&)>;

  // Makes the modules equal, as DataParallel does: each moves to its rank's device, and gets the parameters and buffers
  // of rank 0. Call it on all ranks. Throws Error on every rank: a null module; no worker or no server; a negative
  // staleness; options or modules that differ between ranks; no parameter that needs a gradient; fewer slices than
  // servers.
  ParameterServer(std::shared_ptr<torch::nn::Module> module, Rank& rank, const MakeOptimizer& make_optimizer,
                  const ParameterServerOptions& options = {});
  template <class Module>
  ParameterServer(torch::nn::ModuleHolder<Module> holder, Rank& rank, const MakeOptimizer& make_optimizer,
                  const ParameterServerOptions& options = {})
      : ParameterServer(std::shared_ptr<torch::nn::Module>(holder.is_empty() ? nullptr : holder.ptr()), rank,
                        make_optimizer, options) {}
  ParameterServer(const ParameterServer&) = default;  // a handle: copies are the same, and a move is a copy too
  ParameterServer& operator=(const ParameterServer&) = default;

  // Calls body(worker) on every worker while the servers serve, and returns when all are done. Then the module of every
  // rank has the servers' parameters, so that all ranks can go on together. Call it on all ranks. You may call it
  // again, for example once per epoch; the optimizers go on.
  //
  // If a body throws in synchronous mode, the run ends as always. In the other modes the other workers go on. The
  // result lists the lost workers, the same on every rank. A process that dies ends the run. Throws Error if every
  // worker is lost, or in synchronous mode if the workers' numbers of pushes differ. Throws also as a server's
  // optimizer and Rank::allreduce do.
  std::vector<LostWorker> train(const Body& body);

  bool is_server() const;
  int workers() const;
  // Gives this server's optimizer, to change its learning rate between trainings. On workers it gives null.
  torch::optim::Optimizer* optimizer();

 private:
  std::shared_ptr<ParameterServerRank> rank_;
};

}  // namespace lockstep
