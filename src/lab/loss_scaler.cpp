#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/loss_scaler.hpp>

#include "base/number_text.hpp"
#include "data_parallel/loss_part.hpp"
#include "data_parallel/optimizer_parts.hpp"
#include "data_parallel/replica.hpp"

#include <cmath>
#include <string>
#include <utility>

namespace lockstep {
namespace {

void check_scale(double scale) {
  if (scale > 0 && std::isfinite(scale)) return;
  throw Error("LossScaler: the scale is " + number_text(scale) + "; it must be above 0 and finite",
              {.options = {"scale"}});
}

}  // namespace

LossScaler::LossScaler(const Options& options) : options_(options), scale_(options.scale) {
  check_scale(scale_);
  if (options.growth >= 1 && std::isfinite(options.growth) && options.backoff > 0 && options.backoff <= 1 &&
      options.interval >= 1)
    return;
  throw Error("LossScaler: the growth is " + number_text(options.growth) + ", the backoff " +
                  number_text(options.backoff) + " and the interval " + std::to_string(options.interval) +
                  "; they must be at least 1, in (0, 1], and at least 1",
              {.options = {"growth", "backoff", "interval"}});
}

Loss LossScaler::scale(const Loss& loss) {
  loss.part()->scale(scale_);
  is_scaled_ = true;
  return loss;
}

Step LossScaler::step(Optimizer& optimizer, StepOptions options) {
  if (!std::exchange(is_scaled_, false))
    throw Error("LossScaler: step() without a scaled loss; call scaler.scale(loss).backward() before each step");
  const c10::NoGradGuard no_grad;
  const Replica& replica = *Optimizer::Parts(optimizer).replica();
  const double factor = Loss::Part::scale_divisor(replica, replica.backwards().was_by_grains()) / scale_;
  for (at::Tensor& gradient : optimizer.gradients()) {
    if (gradient.scalar_type() == at::kHalf) {
      throw Error(
          "LossScaler: a parameter is float16, whose gradient would be rounded to zero once it is divided by the "
          "scale. Leave the parameters in float32, and compute forward and the loss under an Autocast(device, "
          "at::kHalf)");
    }
    gradient.mul_(factor);  // an infinity stays one
  }
  options.skip_not_finite = true;
  Step step = optimizer.step(options);
  if (!step.taken) {
    scale_ *= options_.backoff;
    good_steps_ = 0;
  } else if (++good_steps_ >= options_.interval) {
    scale_ *= options_.growth;
    good_steps_ = 0;
  }
  return step;
}

Dataset::Tensors LossScaler::state() const {
  return {{"scale", at::tensor(scale_, at::kDouble)}, {"good_steps", at::tensor(good_steps_, at::kLong)}};
}

void LossScaler::load_state(const Dataset::Tensors& state) {
  const auto is_number = [&](const char* name) { return state.contains(name) && state.at(name).numel() == 1; };
  if (!is_number("scale") || !is_number("good_steps") || state.at("good_steps").item<int64_t>() < 0) {
    throw Error(
        "LossScaler: load_state: the tensors are not those of a LossScaler's state(), `scale` and `good_steps`");
  }
  const auto scale = state.at("scale").item<double>();
  check_scale(scale);
  scale_ = scale;
  good_steps_ = state.at("good_steps").item<int64_t>();
}

}  // namespace lockstep
