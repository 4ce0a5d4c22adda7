// ReplayedSums: steps that add the ranks' batches, recorded and replayed. Where each rank has a GPU of its own the
// exchange is in the graph; where ranks share one it follows the replay.
#pragma once

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include "devices/cuda_graph.hpp"
#include "devices/device_streams.hpp"
#include "lab/graphed_step.hpp"
#include "ranks/rank_wait.hpp"

#include <vector>

namespace lockstep {

class ReplayedSums {
 public:
  static constexpr int kSomeSteps = 8;  // the first of them ordinary ones, the others replays

  explicit ReplayedSums(Rank& rank)
      : rank_(rank),
        stream_(stream_beside(rank.device())),
        recorded_(rank.backend().getBackendName() == "nccl"),
        sum_(torch::zeros({4}, torch::TensorOptions(rank.device()))),
        graphed_(rank, make_cuda_graph(), rank.world_size(), recorded_, [this](const Batch& batch) {
          sum_.copy_(batch.x[0]);
          if (recorded_) exchange();
        }) {}

  void step(float value) {
    const Batch batch{.x = torch::full({1, 4}, value, torch::TensorOptions(rank_.device())),
                      .y = torch::zeros({1}, torch::TensorOptions(rank_.device())),
                      .global_size = rank_.world_size()};
    const bool replayed = graphed_.replay(batch, 0);
    if (!replayed) sum_.copy_(batch.x[0]);
    if (!replayed || !recorded_) exchange();
    ++done_;
  }

  void steps(int count) {
    for (int i = 0; i < count; ++i) step(1);
  }

  // Gives the sum of the last step's values. Waits for the GPU.
  float sum() {
    synchronize(rank_);
    return sum_[0].item<float>();
  }

  int done() const { return done_; }

 private:
  void exchange() {
    std::vector<torch::Tensor> tensors{sum_};
    rank_.backend().allreduce(tensors, {})->wait();
  }

  Rank rank_;
  const c10::StreamGuard stream_;
  const bool recorded_;
  torch::Tensor sum_;
  GraphedStep graphed_;
  int done_ = 0;
};

}  // namespace lockstep
