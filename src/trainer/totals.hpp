// Totals: sums over the samples of an epoch that a rank has seen.
//
// The tensors stay on the rank's device, so that nothing waits for the device, and at one place, for a graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <vector>

namespace lockstep {

// Gives the sum of an epoch's losses, with the same bits however the grains are spread over the ranks.
//
// A step has a row with a cell for each grain of the batch. A rank fills the cells of its own grains, and the others
// stay zero. So the sum of the ranks' rows is exact: each cell has one rank's value. The cells are then added in one
// order, grain by grain and step after step. Use it from the rank's thread only. Only sum() waits for the device.
class GrainLosses {
 public:
  explicit GrainLosses(const c10::Device& device) : device_(device) {}

  void reset(double sum = 0);
  void begin_step(int64_t grains);  // `grains` counts those of the whole batch
  void add(int64_t grain, const at::Tensor& mean, int64_t samples_of_it);
  void drop_step();  // makes the last step count for nothing

  // A graph fills the row of its step anew in each replay: take_row() takes that row out after the recording, and
  // add_row() counts a copy of it after each replay.
  at::Tensor take_row();
  void add_row(const at::Tensor& row) { rows_.push_back(row.clone()); }

  // Gives the sum that reset() got plus all losses since. Call it on all ranks after the same step.
  double sum(Rank& rank);

  // These two do the same in two halves; add up the ranks' cells between them. cells() gives those of the steps since
  // the last take(). take() then gives the sum of all losses.
  at::Tensor cells() const;  // double [grains]
  double take(const at::Tensor& cells);

 private:
  const c10::Device device_;
  double sum_ = 0;                // sum of the steps before those of rows_
  std::vector<at::Tensor> rows_;  // double [grains]
};

struct Totals {
  // Several ranks may have the same samples; give `counts_loss` to one of them.
  Totals(const c10::Device& device, bool counts_loss);
  void reset();
  void add_loss(const at::Tensor& mean, int64_t samples_of_it);
  void add_right(const at::Tensor& answers);  // bool [n]

  at::Tensor loss_that_counts() const;  // gives a sum that the ranks add up
  at::Tensor correct() const;           // gives the number of right answers, int64

  // Where `shared` is set, call it on all ranks at each step's end, before the update. Then each rank knows the sums
  // over all ranks, and keeps these if another rank is lost. If it throws, nothing has changed.
  void share(Rank& rank);

  double mean_loss() const;  // gives 0 before the first sample

  // save() gives three numbers for a checkpoint, whose sums over the ranks are what counts.
  std::vector<double> save() const;
  void load(const at::Tensor& numbers);

  at::Tensor loss;           // float64
  GrainLosses grain_losses;  // with a grain: the same sum, with the same bits on any number of ranks
  at::Tensor right;          // numbers of right answers by the sample's place in its batch, int64 [n]
  bool counts_loss = true;
  double brought = 0;  // where `loss` does not count: what a checkpoint of other ranks had here
  int64_t samples = 0;
  bool shared = false;
  struct {
    double loss = 0;  // sum of grain_losses
    int64_t correct = 0;
  } known;               // sums over all ranks and the epoch's steps so far
  int64_t left_out = 0;  // samples over all ranks whose steps were skipped
};

}  // namespace lockstep
