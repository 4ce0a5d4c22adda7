// GrainStatistics: makes running statistics a function of a batch's grains in their order, on any number of ranks.
//
// A BatchNorm moves its running mean and variance in every forward of training. Each rank computes some of the grains,
// so its statistics would follow these alone. Here a forward leaves statistics unchanged, and its change is only noted.
// finish() gives all ranks all notes, and applies them one after the other. So all ranks have equal statistics, and of
// the same bits as one rank that computes all grains.
//
//   for (each of this rank's grains) statistics.forward(number, [&] { output = net->forward(x); });
//   statistics.finish(batch.runs);  // once all parts of the batch were computed
//
// Use it from the rank's thread only. Cost per forward: a few small tensors per layer. Cost of finish(): one allgather
// of 16 bytes per channel and grain. Without layers that have running statistics it costs nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include "data/parts.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace lockstep {

class GrainStatistics {
 public:
  // Finds the layers of `module` that have running statistics, and keeps pointers to them. Throws Error if one of them
  // is not LibTorch's BatchNorm or InstanceNorm: nobody knows how others change their statistics.
  GrainStatistics(const torch::nn::Module& module, const Rank& rank);

  // Runs compute(), the forward of grain `number`. Layers in training mode leave running statistics and
  // num_batches_tracked as they were, and the change is noted, however often a layer is called. Layers in eval mode
  // compute as always. If a layer has notes of the grain already, as where a forward is computed again, these stay. If
  // compute() throws, nothing is noted. Throws Error: a forward within another one; a BatchNorm that gets one value per
  // channel, as a grain of one sample may give. That text has the sizes of the whole batch and of its grains.
  void forward(int64_t number, const std::function<void()>& compute);
  void set_sizes(int64_t samples, int64_t grain) { samples_ = samples, grain_ = grain; }
  bool is_open() const { return open_; }  // a forward runs

  // Changes the running statistics by all ranks' notes since the last finish(), in the order of the grains. runs[r] up
  // to runs[r + 1] are the grains of rank r. A layer that was not called in a grain, or in eval mode, leaves this grain
  // out. Call it on all ranks, after the last forward. Throws Error: a grain with notes that is not this rank's; as
  // Rank::allgather does.
  void finish(const std::vector<int64_t>& runs);

  void abandon() { notes_.clear(); }  // forgets the notes

 private:
  struct Layer {
    const torch::nn::Module* module = nullptr;
    at::Tensor mean, variance, batches;  // its buffers
    bool counts_batches = true;          // LibTorch's InstanceNorm does not
  };
  // Holds the change that one grain's forwards make to a layer's statistics: statistics * kept + the values here. If
  // the layer has no momentum, the values are the means over these forwards.
  struct Note {
    at::Tensor mean, variance;  // undefined if the layer was in eval mode
    int64_t forwards = 0;
    double kept = 1;
  };
  using Notes = std::map<int64_t, std::vector<Note>>;  // the key is the grain; it has one Note per layer

  // replace() gives the layers in training mode memory of the notes, and returns their own; for other layers nothing.
  std::vector<Layer> replace(std::vector<Note>& notes);
  void put_back(const std::vector<Layer>& saved, std::vector<Note>& notes);
  [[noreturn]] void refuse_one_sample(int64_t number) const;
  void check_grains(const std::vector<int64_t>& runs) const;
  at::Tensor own_table(const Range& grains) const;
  void apply(const at::Tensor& table);
  int64_t values() const;  // gives the number of values in all layers' statistics

  Rank rank_;
  std::vector<Layer> layers_;
  Notes notes_;
  bool open_ = false;  // a forward runs
  int64_t samples_ = 0, grain_ = 0;
};

}  // namespace lockstep
