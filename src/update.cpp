#include "update.hpp"

#include <lockstep/optimizers.hpp>

#include "train_options.hpp"

namespace lockstep {
namespace {

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const TrainOptions& options,
                                                      const std::vector<at::Tensor>& parameters) {
  if (is_plain_sgd(options)) return nullptr;
  return make_optimizer(options.optimizer, parameters, optimizer_settings(options));
}

}  // namespace

Update::Update(const TrainOptions& options, const std::vector<at::Tensor>& parameters)
    : rate_(learning_rate_of(options)), sgd_(parameters, options.lr), optimizer_(optimizer_of(options, parameters)) {}

void Update::zero_grad() {
  sgd_.zero_grad();  // of any optimizer's parameters
}

double Update::set_time(double epochs_done) {
  const double lr = learning_rate_at(rate_, epochs_done);
  if (optimizer_) {
    set_learning_rate(*optimizer_, lr);
  } else {
    sgd_.set_lr(lr);
  }
  return lr;
}

void Update::step() {
  if (optimizer_) {
    optimizer_->step();
  } else {
    sgd_.step();
  }
}

}  // namespace lockstep
