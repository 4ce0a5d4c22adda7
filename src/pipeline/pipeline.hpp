// Pipeline trains a network that is split by its layers. Each rank holds some of them, and ranks compute different
// microbatches of a batch at once. A SplitModel has one.
//
// Activations and gradients travel over the rank's backend, between threads or processes. pipeline_schedule.hpp has the
// schedules. The contract: after forward_backward every rank has the gradients that one device's backward of the whole
// batch's mean loss gives. BatchNorm is the exception, since it normalises over a microbatch. Use it on the rank's
// thread only. A microbatch costs two messages per boundary, one of activations and one of their gradients.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include "data/parts.hpp"
#include "pipeline_mail.hpp"
#include "pipeline_shapes.hpp"
#include "pipeline_stage.hpp"
#include "pipeline_ties.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class Pipeline {
 public:
  // Make it on all ranks of the pipeline axis, with the stages of split_into_stages(); stage s goes to rank s % ranks.
  // This rank's stages move to its device; the others are not kept. Its messages have the tags 32763 to 32767; take
  // others for messages of your own over the same rank. Throws Error for a SyncBatchNorm in a stage, and for ranks that
  // differ in their splits.
  Pipeline(const std::vector<torch::nn::Sequential>& stages, Rank& rank, const ModelSplit& split);
  Pipeline& operator=(Pipeline&&) = delete;

  // Gives this rank's layers as one module, under the net's names. Do not call its forward: with several stages per
  // rank the layers do not follow each other.
  const torch::nn::Sequential& module() const { return module_; }

  // Runs the schedule over the microbatches of `batch`, and adds the gradient of the global batch's mean loss to the
  // parameters' .grad. Returns the mean loss of this pipeline's part on every rank: a scalar of double on its device,
  // without a graph. `replica` is module()'s over the data axis: each stage's gradients are averaged during and after
  // its last backward. Pass the same batch on every rank: the first stage reads x, the last one y, and all use its
  // size. For an empty batch it returns 0. Before the first batch of a new shape of samples, two samples of zeros go
  // through all stages, in eval mode and without a trace. From them every rank learns the shapes. A batch with a grain
  // gives the same bits on any number of ranks and stages: its grains are the microbatches. Throws Error before the
  // batch's first step for a layer that cannot take its input (the text names both). So it does for a stage's output
  // that is not of floating point or has not the samples first. Batches that differ between the ranks are such an error
  // too. Throws Error afterwards for a Batch::mark that is not the last rank's (on GPUs in the first batches only), and
  // for a loss without a graph. Throws as Rank::allreduce does when another rank fails or is missing. A rank whose
  // stage throws ends the run of all.
  at::Tensor forward_backward(const Batch& batch, const Criterion& criterion, const std::shared_ptr<Replica>& replica);

  // Returns the network's output for `x` [n, …], without gradients, on every rank and its device. Pass the same x on
  // every rank. It is computed in microbatches, in module()'s mode, train or eval.
  at::Tensor forward(const at::Tensor& x);

 private:
  using Shapes = std::vector<SampleShape>;
  using TieGradients = std::vector<std::pair<int, at::Tensor>>;  // gradients, each with its tie's number

  // Holds this rank's steps of a schedule, and their messages.
  struct Work {
    std::vector<PipelineStep> steps;
    PipelineMessages messages;
  };

  // Holds a batch on its way through this rank's stages.
  struct Passage {
    const Batch& batch;
    const Criterion& criterion;
    const std::shared_ptr<Replica>& replica;
    const std::vector<Range> microbatches;
    const at::Tensor loss;              // the mean over the microbatches so far
    std::map<int, int> backwards = {};  // how many backwards are done, by stage

    bool by_grains() const { return batch.grain > 0; }
    Range range(const PipelineStep& step) const { return microbatches[static_cast<size_t>(step.microbatch)]; }
  };

  const Shapes& shapes_for(const at::Tensor& x);
  const Work& work_for(int microbatches, bool backward);
  std::vector<Range> microbatches_of(int64_t samples) const;  // gives each microbatch's range of the samples
  PipelineMail mail(const Work& work, const Shapes& shapes, const std::vector<Range>& microbatches);

  at::Tensor run(const Batch& batch, const Criterion& criterion, const std::shared_ptr<Replica>& replica,
                 const Shapes& shapes);
  at::Tensor forward(Passage& passage, const PipelineStep& step, const at::Tensor& received, bool backward_next);
  at::Tensor backward(Passage& passage, const PipelineStep& step, const at::Tensor& received, const TieGradients& ties);
  PipelineStage::Head head(const Passage& passage, const Range& range);
  int64_t grain_of(const Passage& passage, const PipelineStep& step) const;  // gives the grain's number in the batch
  SampleScope::Place place_of(const Range& range) const;

  PipelineStage& stage(int index) { return stages_[static_cast<size_t>(index / rank_.world_size())]; }
  bool is_last(int stage) const { return stage == split_.stages() - 1; }
  int last_rank() const { return rank_.world_size() - 1; }
  bool on_gpu() const { return !rank_.device().is_cpu(); }

  Rank rank_;
  const ModelSplit split_;
  std::vector<PipelineStage> stages_;  // this rank's stages, ascending
  torch::nn::Sequential module_;
  std::optional<PipelineTies> ties_;
  std::set<std::pair<std::string, int64_t>> compared_;  // shapes and sizes of batches that all ranks had
  std::map<std::string, Shapes> shapes_;                // shapes by the shape of an input's sample
  std::map<std::pair<int, bool>, Work> work_;
  SampleScope::Place place_;
  int64_t inputs_ = 0;   // how many batches were trained
  int64_t outputs_ = 0;  // how many calls of forward there were
  int checked_ = 0;      // how many batches' marks were compared
};

}  // namespace lockstep
