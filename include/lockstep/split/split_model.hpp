// SplitModel trains a torch::nn::Sequential over all ranks of a run, split by data, layers and channels at once.
//
//   lockstep::SplitModel net(my_layers, rank, {.mesh = {.data = 2, .pipeline = 2}, .microbatches = 4});
//   lockstep::Optimizer sgd(net, torch::optim::SGDOptions(/*lr=*/0.1));
//   for (auto& batch : lockstep::batches(train_set, {.size = 256}, net.mesh().data())) {
//     sgd.zero_grad();
//     net.loss(batch, torch::nn::functional::cross_entropy).backward();
//     sgd.step();
//   }
//
// It splits layers by channels, cuts the net into the stages of a pipeline, and averages gradients as DataParallel
// does: one inside the other over the axes of a Mesh; axes of length 1 cost nothing. The contract: whatever the split,
// gradients are those of the mean loss over the whole global batch. But BatchNorm normalises over what a rank computes
// at once. Use a SplitModel on its rank's thread only.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/split/mesh.hpp>

#include <cstdint>
#include <memory>
#include <type_traits>

namespace lockstep {

class Pipeline;

class SplitModel {
 public:
  // Call it on all ranks, with equal nets. It copies some of the net's layers, and takes over the others. With a split
  // by layers or channels the parameters' `.grad` is undefined outside of backwards: only an Optimizer of the
  // SplitModel finds the gradients, since a rank's part of them is not the network's. With `takes_batch` the net is one
  // layer whose forward takes a Batch, and gets it in the place of x. Throws Error as check_mesh, check_split and
  // DataParallel do. So it does for a null net, for ranks whose splits differ, and for a layer that cannot be split by
  // channels (the text names the layer, and what would fit). A pipeline throws Error for a parameter that two stages
  // would share, and for a SyncBatchNorm. Layers of LibTorch that draw random numbers beside `recompute`, and a
  // takes_batch beside a split by layers or channels, are such errors too.
  SplitModel(const torch::nn::Sequential& net, Rank& rank, const ModelSplit& split,
             const DataParallelOptions& options = {}, bool takes_batch = false);
  SplitModel(const SplitModel&) = default;  // a handle: copies are the same model, and a move is a copy too

  Mesh& mesh() { return mesh_; }

  // Returns the mean loss of this rank's part: see DataParallel::loss(). Pass the part of mesh().data()'s index, the
  // same on all ranks of that index. The loss too is equal on these ranks, and its global_item() is of the whole batch.
  // Call it on all ranks. In a pipeline, and with a grain, forward and backward interleave: Loss::backward() computes
  // both, with the Autocast that is on now, and value(), item() and global_item() throw Error before it. Call
  // backward() before the next loss() then: BatchNorm's running statistics follow the last one. A loss that is dropped
  // without backward() costs nothing. A pipeline calls the criterion where the last layer is, with a microbatch without
  // x. Throws Error for ranks of one data index whose batches differ in size or Batch::mark (on GPUs in the first
  // batches only). So it does for a grain beside a split by channels. backward() of a net that is split by layers or
  // channels throws Error without an Optimizer, and after a step whose gradients Optimizer::zero_grad() has not
  // cleared. backward() also throws Error for a layer that cannot take its input, and as Loss::backward() does.
  Loss loss(const Batch& batch, const Criterion& criterion);
  // Returns the same as loss(batch, Criterion(function, options)).
  template <class Options>
  Loss loss(const Batch& batch, at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&),
            const std::type_identity_t<Options>& options) {
    return loss(batch, Criterion(function, options));
  }

  // See DataParallel's functions of these names.
  [[nodiscard]] NoSync no_sync() { return replicas_.no_sync(); }
  int64_t steps_done() const { return replicas_.steps_done(); }
  void set_steps_done(int64_t steps) { replicas_.set_steps_done(steps); }

  // Returns the network's output, without gradients, on all ranks of one data index. Pass the same x on all of them. So
  // evaluate(forward, test_set, mesh().data()) evaluates on all ranks.
  torch::Tensor forward(const torch::Tensor& x);
  torch::Tensor forward(const Batch& batch);  // takes batch.x, or with takes_batch the batch

  // Copies parameters and buffers of the whole network, from the replica of this data index, into `net` on every rank.
  // Pass another network of the same layers, on the CPU, as `net`. Call it on all ranks. It costs the network's bytes
  // over the pipeline and tensor axes.
  void gather(torch::nn::Sequential& net);

  void train(bool on = true) { module_->train(on); }  // calls torch::nn::Module's on every layer
  void eval() { module_->eval(); }

  Whole whole() const { return replicas_.whole(); }  // needs DataParallelOptions::sharded
  std::shared_ptr<TrainedNet> trained() const;       // is for an Optimizer

 private:
  class Trained;

  const ModelSplit split_;
  const bool takes_batch_;
  Mesh mesh_;
  torch::nn::Sequential module_;        // this rank's layers, or slices of them
  std::shared_ptr<Pipeline> pipeline_;  // the pipeline; null: one stage, and one microbatch
  DataParallel<torch::nn::SequentialImpl> replicas_;
  int checked_ = 0;  // how many batches the tensor axis checked
};

}  // namespace lockstep
