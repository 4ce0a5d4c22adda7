// A pipeline over all ranks of a run, with one replica.
#pragma once

#include <lockstep/data_parallel/data_parallel.hpp>

#include "pipeline/pipeline.hpp"
#include "pipeline/split_into_stages.hpp"
#include "ranks/rank_place.hpp"

#include <memory>

namespace lockstep {

class LonePipeline {
 public:
  // Takes from `split` the schedule, the stages per rank, the microbatches, `recompute` and the cuts alone.
  LonePipeline(const torch::nn::Sequential& net, Rank& rank, ModelSplit split = {.microbatches = 4})
      : alone_(comm::RankPlace::alone(rank)), pipeline_(made(net, rank, split)), replicas_(module().ptr(), alone_) {}

  torch::nn::Sequential module() const { return pipeline_->module(); }
  at::Tensor forward_backward(const Batch& batch, const Criterion& criterion) {
    return pipeline_->forward_backward(batch, criterion, replicas_.replica());
  }
  at::Tensor forward(const at::Tensor& x) { return pipeline_->forward(x); }

 private:
  static std::shared_ptr<Pipeline> made(const torch::nn::Sequential& net, Rank& rank, ModelSplit& split) {
    split.mesh = {.pipeline = rank.world_size()};
    return std::make_shared<Pipeline>(split_into_stages(net, split), rank, split);
  }

  Rank alone_;
  std::shared_ptr<Pipeline> pipeline_;
  DataParallel<torch::nn::SequentialImpl> replicas_;
};

}  // namespace lockstep
