// WeightAverage: an exponential moving average of weights, which can stand in their place for a while.
//
// It computes value by value, one rounding after the other, so that slices of weights have the bits of whole ones. Cost
// per step: two passes over the weights, and memory for a copy of them. Use it from one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

class WeightAverage {
 public:
  // A tensor may be among the weights twice.
  WeightAverage(double decay, std::vector<at::Tensor> weights);

  // Call it after each step. The first call makes the average the weights.
  void add();
  bool is_begun() const { return begun_; }

  // Makes `values` the average, one for each weight.
  void set(const std::vector<at::Tensor>& values);

  // Gives the average of each weight; none before the first step. While exchanged, it gives the weights.
  const std::vector<at::Tensor>& values() const { return average_; }

  // Exchanges the values of the average and of the weights. Before the first step it does nothing.
  void exchange();

 private:
  const double decay_;
  const std::vector<at::Tensor> weights_;
  std::vector<bool> comes_again_;  // true for a weight that came before, as tied weights do
  std::vector<at::Tensor> average_;
  bool begun_ = false;  // the average has begun; with slices a rank may have none
};

}  // namespace lockstep
