// Pipeline: splits a network by its layers, so that each rank holds some of them and ranks compute different
// microbatches of a batch at once.
//
//   auto stages = lockstep::split_into_stages(net, rank.world_size());
//   lockstep::Pipeline pipeline(stages, rank, {.microbatches = 8});
//   torch::optim::SGD sgd(pipeline.module()->parameters(), /*lr=*/0.1);
//   …
//   sgd.zero_grad();
//   const auto loss = pipeline.forward_backward(batch, torch::nn::functional::cross_entropy);
//   sgd.step();
//
// Activations and gradients travel over the rank's backend, between threads or processes. pipeline_schedule.hpp has the
// schedules. The contract: after forward_backward every rank has the gradients that one device's backward of the whole
// batch's mean loss gives. BatchNorm is the exception, since it normalises over a microbatch. Use it on its rank's
// thread only. Cost per microbatch and boundary: two messages, one of activations and one of their gradients.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>
#include <lockstep/ranks/rank.hpp>

#include <initializer_list>
#include <memory>
#include <vector>

namespace lockstep {

// Cuts a network of layers into stages. `cuts` are the first layers of stages 1, 2, …. For example {2, 4} cuts a net of
// 5 layers into stages of layers 0 1, 2 3, and 4. The stages share the net's layers under their names, so a parameter
// has the same name as in the net. A skip connection must lie inside one layer (a module whose forward adds its input).
// Throws Error, which says what would fit, for a cut outside of 1 … layers - 1, cuts that do not ascend, more stages
// than layers, or a parameter that two stages would share. A layer of a later stage may borrow a parameter: see
// TiedLinear.
std::vector<torch::nn::Sequential> split_into_stages(const torch::nn::Sequential& net,
                                                     const std::vector<int64_t>& cuts);
std::vector<torch::nn::Sequential> split_into_stages(const torch::nn::Sequential& net,
                                                     std::initializer_list<int64_t> cuts);
// The same with nearly as many layers in each stage, whatever they cost. A plan balances the cost (plan.hpp).
std::vector<torch::nn::Sequential> split_into_stages(const torch::nn::Sequential& net, int stages);

struct PipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  // The number of microbatches, nearly equal in size. A smaller batch is cut into single samples. With Batch::grain the
  // grains are the microbatches, and this is ignored.
  int microbatches = 4;
  // true: keeps only a stage's input until its backward, which computes the stage's forward again. This takes less
  // memory and more time. Layers must not draw random numbers. LibTorch's layers that do (dropout with p > 0) are
  // refused; layers of your own are not checked. lockstep::Dropout is allowed, since it drops the same values again.
  bool recompute = false;
  bool measure = false;  // on GPUs: waits for the device around each step, so that stats() are right; costs time
};

// The times of the last forward_backward on this rank.
struct PipelineStats {
  double seconds = 0;    // from its call to its return
  double computing = 0;  // how long its stages computed forwards and backwards; on GPUs, NaN without `measure`

  double idle_share() const { return 1 - computing / seconds; }  // compare it with ideal_idle_share()
};

class Pipeline {
 public:
  // Give as many `stages` as ranks, or with PipelineSchedule::interleaved a multiple of that; stage s goes to rank s %
  // ranks. This rank's stages move to its device. The other ranks' stages are not looked at and not kept: they may be
  // null ({nullptr}). All ranks must make it. Its messages have the tags 32764 to 32767; take others for messages of
  // your own over the same rank. Throws Error, which says what would fit, for a number of stages that does not go with
  // the ranks or the schedule, and for a stage of this rank that is null or empty. So it does for microbatches < 1,
  // layers that draw random numbers with recompute, two layers of one name on this rank, and ranks that differ in their
  // options or their number of stages.
  Pipeline(std::vector<torch::nn::Sequential> stages, Rank& rank, const PipelineOptions& options = {});
  Pipeline(const Pipeline&) = default;  // a handle: copies are the same pipeline, and a move is a copy too
  Pipeline& operator=(const Pipeline&) = default;

  // This rank's layers as one module, under the net's names: for its parameters, train() and eval(), a DataParallel, a
  // checkpoint. Do not call its forward: with several stages per rank its layers do not follow each other.
  torch::nn::Sequential module() const;

  // Runs the schedule over the microbatches of `batch`, adds the gradient of its mean loss to the parameters' .grad,
  // and returns that mean loss on every rank: a scalar of double on its device, without a graph. Pass the same batch on
  // every rank: the first stage reads x, the last one y, and all use its size. For an empty batch it returns 0, and the
  // gradients stay what they were. Before the first batch of a new shape of samples, two samples of zeros go through
  // all stages, in eval mode and without a trace, so that every rank knows what to expect.
  // Throws Error before the batch's first step for a layer that cannot take its input (the text names both), and for a
  // stage whose output's first dimension is not the samples or that is not of floating point. So it does for batches
  // that differ between the ranks, and for batches that are parts of a larger one, by their global_size. Throws Error
  // afterwards for a Batch::mark that is not the last rank's (on GPUs in the first batches only), and for a loss
  // without a graph. Throws as Rank::allreduce does when another rank fails or is missing. A rank whose stage throws
  // ends the run of all.
  torch::Tensor forward_backward(const Batch& batch, const Criterion& criterion);

  // The same for several pipelines that train side by side. `replicas` is a DataParallel of module() over the ranks
  // that hold the same stages. `batch` is this pipeline's part of the global batch; it may be empty. Its global_size is
  // the whole batch's size. The gradients become those of the global batch's mean loss. Each stage's gradients are
  // averaged during its last backward and after it. A batch with a grain gives the same bits on any number of ranks and
  // stages. Returns the loss of this pipeline's part.
  torch::Tensor forward_backward(const Batch& batch, const Criterion& criterion, Replicas& replicas);

  // Returns the network's output for `x` [n, …], without gradients, on every rank and its device. Pass the same x on
  // every rank. It is computed in microbatches, in module()'s mode, train or eval. All ranks of this pipeline need the
  // same samples. So in evaluate(forward, dataset, rank) pass the data axis's rank, or without a data axis that of a
  // world of one.
  torch::Tensor forward(const torch::Tensor& x);

  PipelineStats stats() const;

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace lockstep
