#include "update.hpp"

#include <lockstep/optim/optimizers.hpp>

#include "train_options.hpp"

namespace lockstep {
namespace {

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const TrainOptions& options,
                                                      const std::vector<at::Tensor>& parameters) {
  if (is_plain_sgd(options) || options.zero_stage > 0) return nullptr;
  return make_optimizer(options.optimizer, parameters, optimizer_settings(options));
}

std::unique_ptr<ShardedOptimizer> sharded_of(const TrainOptions& options,
                                             DataParallel<torch::nn::SequentialImpl>& net) {
  if (options.zero_stage == 0) return nullptr;
  const auto make = [&](const std::vector<at::Tensor>& slices) {
    return make_optimizer(options.optimizer, slices, optimizer_settings(options));
  };
  return std::make_unique<ShardedOptimizer>(net, make, ShardedOptions{.stage = options.zero_stage});
}

}  // namespace

Update::Update(const TrainOptions& options, DataParallel<torch::nn::SequentialImpl>& net)
    : rate_(learning_rate_of(options)),
      sgd_(net->parameters(), options.lr),
      optimizer_(optimizer_of(options, net->parameters())),
      sharded_(sharded_of(options, net)) {}

void Update::zero_grad() {
  if (sharded_) return sharded_->zero_grad();
  sgd_.zero_grad();  // of any optimizer's parameters
}

double Update::set_time(double epochs_done) {
  const double lr = learning_rate_at(rate_, epochs_done);
  if (optimizer_ || sharded_) {
    set_learning_rate(sharded_ ? sharded_->optimizer() : *optimizer_, lr);
  } else {
    sgd_.set_lr(lr);
  }
  return lr;
}

void Update::step() {
  if (sharded_) {
    sharded_->step();
  } else if (optimizer_) {
    optimizer_->step();
  } else {
    sgd_.step();
  }
}

}  // namespace lockstep
