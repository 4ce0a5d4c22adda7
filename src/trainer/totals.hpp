// Totals: sums over the samples of an epoch that a rank has seen.
//
// The tensors stay on the rank's device, so that nothing waits for it. They stay where they are, so that a graph finds
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include "grain_losses.hpp"

#include <cstdint>
#include <vector>

namespace lockstep {

struct Totals {
  explicit Totals(const c10::Device& device);
  void reset();
  void add_loss(const at::Tensor& mean, int64_t samples_of_it);
  void add_correct(const at::Tensor& answers);  // a number of right answers

  // Where `shared` is set, each step ends with it, before its update, on all ranks. Then each of them knows the sums
  // over all ranks, and keeps them if another rank is lost. If it throws, nothing has changed.
  void share(Rank& rank);

  double mean_loss() const;  // 0 before the first sample

  // For a checkpoint: three numbers, whose sums over the ranks are what counts.
  std::vector<double> save() const;
  void load(const at::Tensor& numbers);

  at::Tensor loss;
  GrainLosses grain_losses;  // with a grain: the same sum, with the same bits on any number of ranks
  at::Tensor correct;
  int64_t samples = 0;
  bool shared = false;
  struct {
    double loss = 0;  // sum of grain_losses
    int64_t correct = 0;
  } known;               // sums over all ranks and the epoch's steps so far
  int64_t left_out = 0;  // samples over all ranks whose steps were skipped
};

}  // namespace lockstep
