// SplitModel: a torch::nn::Sequential that trains over all ranks of a run, split by data, layers and channels at once.
//
//   lockstep::SplitModel net(my_layers, rank, {.mesh = {.data = 2, .pipeline = 2}, .microbatches = 4});
//   lockstep::Optimizer sgd(net, torch::optim::SGDOptions(/*lr=*/0.1));
//   for (auto& batch : lockstep::batches(train_set, {.size = 256}, net.mesh().data())) {
//     sgd.zero_grad();
//     net.forward_backward(batch, torch::nn::functional::cross_entropy);
//     sgd.step();
//   }
//
// It is shard(), Pipeline and DataParallel, one inside the other over the axes of a Mesh; axes of length 1 cost
// nothing. The contract: whatever the split, gradients are those of the mean loss over the whole global batch. But
// BatchNorm normalises over what a rank computes at once. Used by its rank's thread only.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/pipeline/pipeline.hpp>
#include <lockstep/split/mesh.hpp>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep {

class UnequalScaling;

// The parameters that one rank has of a network, while other ranks have others. It is a list like any other one. But
// what would need all of them does not compile: see the end of this file.
struct ParametersOfOneRank : std::vector<torch::Tensor> {
  explicit ParametersOfOneRank(std::vector<torch::Tensor> parameters)
      : std::vector<torch::Tensor>(std::move(parameters)) {}
};

class SplitModel {
 public:
  // All ranks must call it with equal nets. It copies some of the net's layers, and takes over the others themselves.
  // With `takes_batch` the net is one layer whose forward takes a Batch, and gets it in the place of x. Throws Error as
  // check_mesh, check_split, shard, Pipeline and DataParallel do, for a null net, and for a takes_batch beside a split
  // by layers or channels.
  SplitModel(const torch::nn::Sequential& net, Rank& rank, const ModelSplit& split,
             const DataParallelOptions& options = {}, bool takes_batch = false);
  SplitModel(const SplitModel&) = default;  // a handle: copies are the same model, and a move is a copy too

  Mesh& mesh() { return mesh_; }
  const ModelSplit& split() const { return split_; }

  // The layers and slices that this rank holds, under the network's names.
  torch::nn::Sequential module() const { return module_; }
  // An Optimizer of the net clips by the whole network's norm. torch's clip_grad_norm_ would scale by the norm of this
  // rank's part alone, and does not compile. With a list of one's own it does. Then the next forward_backward(),
  // forward() or gather() throws an Error that says so, unless the gradients were set to zero in the meantime.
  ParametersOfOneRank parameters() const { return ParametersOfOneRank(module_->parameters()); }
  DataParallel<torch::nn::SequentialImpl>& replicas() { return replicas_; }  // over the data axis

  // Adds the gradient of the global batch's mean loss to .grad. `batch` is the part of mesh().data()'s index, the same
  // for all ranks of that index. Returns the part's mean loss, a double on the rank's device, equal on these ranks; 0
  // for an empty part. The criterion is called where the last layer is; in a pipeline, with a microbatch without x. All
  // ranks must call it. Throws Error: ranks of one data index whose batches differ, by their size or by Batch::mark (on
  // GPUs in the first batches only); gradients that these ranks scaled by different factors since the last call; parts
  // that do not make up the global batch; a loss without a graph; as Loss::backward() and Pipeline do.
  torch::Tensor forward_backward(const Batch& batch, const Criterion& criterion);

  // Returns the network's output, without gradients, on all ranks of one data index. They must all pass the same x. So
  // evaluate(forward, test_set, mesh().data()) evaluates on all ranks.
  torch::Tensor forward(const torch::Tensor& x);
  torch::Tensor forward(const Batch& batch);  // of batch.x, or with takes_batch of the batch

  // Copies parameters and buffers of the whole network, from the replica of this data index, into `net` on every rank.
  // `net` is another network of the same layers, on the CPU. All ranks must call it. Cost: the network's bytes over the
  // pipeline and tensor axes.
  void gather(torch::nn::Sequential& net);

  // See PipelineStats; empty if no pipeline is used.
  std::optional<PipelineStats> pipeline_stats() const;

  void train(bool on = true) { module_->train(on); }  // as of a torch::nn::Module, on every layer
  void eval() { module_->eval(); }

  Whole whole() const { return replicas_.whole(); }  // with DataParallelOptions::sharded
  std::shared_ptr<TrainedNet> trained() const;       // for an Optimizer

 private:
  class Trained;
  torch::Tensor whole_forward_backward(const Batch& batch, const Criterion& criterion);
  torch::Tensor output_of(const Batch& part);
  std::vector<torch::nn::Sequential> stages_of(const torch::nn::Sequential& net) const;

  const ModelSplit split_;
  const bool takes_batch_;
  Mesh mesh_;
  torch::nn::Sequential sharded_;  // by channels; all layers, as far as this rank keeps them
  std::optional<Pipeline> pipeline_;
  torch::nn::Sequential module_;
  DataParallel<torch::nn::SequentialImpl> replicas_;
  std::shared_ptr<UnequalScaling> scaling_;
  int checked_ = 0;  // batches that the tensor axis compared
};

}  // namespace lockstep

namespace torch::nn::utils {

// It would scale by the norm of one rank's part. Take a lockstep::Optimizer, and StepOptions::clip.
double clip_grad_norm_(const lockstep::ParametersOfOneRank& parameters, double max_norm, double norm_type = 2,
                       bool error_if_nonfinite = false) = delete;

}  // namespace torch::nn::utils
