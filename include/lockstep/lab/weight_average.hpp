// WeightAverage: an exponential moving average (EMA) of a net's weights, which can stand in their place for a while.
//
//   lockstep::WeightAverage average(net, 0.999);
//   for (auto& batch : …) {
//     …
//     adam.step();
//     average.add();
//   }
//   const auto shown = average.shown();  // while this lives, the net has the average: evaluate, save
//
// Use a WeightAverage from its rank's thread only. Cost per step: two passes over the parameters. Memory: a copy of
// them, with Sharded::parameters of this rank's slices. The average is computed value by value, one rounding after the
// other, so that slices have the bits of whole parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/loss.hpp>

#include <memory>
#include <vector>

namespace lockstep {

class TrainedNet;

// To go on with an average, load its weights into the net and call add(); then load the net's own weights.
class WeightAverage {
 public:
  // Averages the parameters of `net`, a DataParallel or a SplitModel; not its buffers. Make it alike on all ranks.
  // Throws Error for a decay below 0, or of 1 or more.
  template <class Net>
  WeightAverage(const Net& net, double decay) : WeightAverage(net.trained(), decay) {}
  WeightAverage& operator=(WeightAverage&&) = delete;

  // Makes the average decay * average + (1 - decay) * weights; the first call makes it the weights, as in PyTorch's
  // AveragedModel. Call it after each step. Throws Error while a Shown lives.
  void add();
  bool is_begun() const { return begun_; }

  // Gives this rank's part of the average, one tensor per parameter; none before the first add().
  const std::vector<at::Tensor>& values() const { return average_; }

  // While a Shown lives, the net's parameters are the average, and whole on every rank, as while a Whole lives. Before
  // the first add() nothing changes. Make a Shown on all ranks, and not while a Whole lives. Do not train meanwhile.
  class [[nodiscard]] Shown {
   public:
    explicit Shown(WeightAverage& average);
    ~Shown();
    Shown& operator=(Shown&&) = delete;

   private:
    WeightAverage& average_;
    std::unique_ptr<Whole> whole_;
  };
  Shown shown() { return Shown(*this); }

 private:
  WeightAverage(const std::shared_ptr<TrainedNet>& net, double decay);
  void exchange();

  const std::shared_ptr<Replica> replica_;
  const double decay_;
  const std::vector<at::Tensor> weights_;
  std::vector<at::Tensor> average_;
  bool begun_ = false;  // the average has begun; a rank without slices has no tensors of it
  bool shown_ = false;
};

}  // namespace lockstep
