#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/weight_average.hpp>

#include "base/number_text.hpp"
#include "data_parallel/replica.hpp"
#include "data_parallel/trained_net.hpp"
#include "ranks/trained_parameters.hpp"

namespace lockstep {
namespace {

// A rank with slices of the parameters averages these.
std::vector<at::Tensor> weights_of(const Replica& replica) {
  std::vector<at::Tensor> weights;
  for (const auto& [name, weight] :
       replica.divides_parameters() ? slices_of(replica.sharded()->buckets()) : parameters_of(replica.module()))
    weights.push_back(weight);
  return weights;
}

}  // namespace

WeightAverage::WeightAverage(const std::shared_ptr<TrainedNet>& net, double decay)
    : replica_(net->replica()), decay_(decay), weights_(weights_of(*replica_)) {
  if (decay >= 0 && decay < 1) return;
  throw Error(replica_->rank().name() + ": WeightAverage: the decay is " + number_text(decay) +
              "; it must be from 0 to below 1, such as 0.999");
}

void WeightAverage::add() {
  if (shown_) {
    throw Error(replica_->rank().name() +
                ": WeightAverage: add() while the average stands in the weights' place. End what shown() gave before "
                "you train on");
  }
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (begun_) {
      average_[i].mul_(decay_).add_(weights_[i] * (1 - decay_));
    } else {
      average_.push_back(weights_[i].detach().clone());
    }
  }
  begun_ = true;
}

void WeightAverage::exchange() {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < average_.size(); ++i) {
    const at::Tensor weights = weights_[i].detach().clone();
    weights_[i].copy_(average_[i]);
    average_[i].copy_(weights);
  }
}

WeightAverage::Shown::Shown(WeightAverage& average) : average_(average) {
  average_.exchange();
  average_.shown_ = true;
  whole_ = std::make_unique<Whole>(average_.replica_);
}

WeightAverage::Shown::~Shown() {
  whole_.reset();  // its end takes over the parameters' values
  average_.exchange();
  average_.shown_ = false;
}

}  // namespace lockstep
