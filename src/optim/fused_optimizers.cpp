#include "fused_optimizers.hpp"

#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "optimizer_parts.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

using torch::optim::OptimizerParamGroup;
using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

// Tells whether the tensors lie in memory alike: a kernel goes through the memory of all its tensors in step.
bool lie_alike(const at::Tensor& parameter, const at::Tensor& other) {
  return other.defined() && other.layout() == at::kStrided && other.scalar_type() == parameter.scalar_type() &&
         other.device() == parameter.device() && other.sizes() == parameter.sizes() &&
         other.strides() == parameter.strides();
}

// Tells whether kernels can take the group's parameters that have a gradient, with the members of their states. Each
// type has its own kernel, so parameters of another type on the same rank change no bit.
template <class Members>
bool fits_kernel(const OptimizerParamGroup& group, const States& states, const Members& members_of) {
  const at::Tensor* first = nullptr;
  for (const auto& parameter : group.params()) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (first == nullptr) first = &parameter;
    if (parameter.device() != first->device()) return false;
    if (!at::isFloatingType(parameter.scalar_type()) || !parameter.is_non_overlapping_and_dense()) return false;
    if (!lie_alike(parameter, gradient)) return false;
    const auto state = states.find(parameter.unsafeGetTensorImpl());
    if (state == states.end()) continue;
    for (const at::Tensor& member : members_of(*state->second)) {
      if (!lie_alike(parameter, member)) return false;
    }
  }
  return true;
}

// Makes the parameter's tensors of the state by `make`, if it has none yet.
template <class State, class Make>
State& state_of(States& states, const at::Tensor& parameter, const Make& make) {
  auto& kept = states[parameter.unsafeGetTensorImpl()];
  if (!kept) {
    auto state = std::make_unique<State>();
    make(*state);
    kept = std::move(state);
  }
  return static_cast<State&>(*kept);
}

template <class Options, class State>
bool fits_adam(const std::vector<OptimizerParamGroup>& groups, const States& states) {
  const auto members_of = [](const torch::optim::OptimizerParamState& kept) {
    const auto& state = static_cast<const State&>(kept);
    return std::array{state.exp_avg(), state.exp_avg_sq()};
  };
  return std::all_of(groups.begin(), groups.end(), [&](const auto& group) {
    return !static_cast<const Options&>(group.options()).amsgrad() && fits_kernel(group, states, members_of);
  });
}

// Adds the parameter to the launches of one group, of which each type has one.
Fused::Launch& launch_of(std::map<at::ScalarType, Fused::Launch>& launches, const at::Tensor& parameter,
                         const OptimizerParamGroup& group, const at::Tensor& rate) {
  Fused::Launch& launch = launches.try_emplace(parameter.scalar_type()).first->second;
  launch.options = &group.options();
  launch.rate = rate;
  launch.parameters.push_back(parameter);
  launch.gradients.push_back(parameter.grad());
  return launch;
}

void add_launches(std::map<at::ScalarType, Fused::Launch>& launches, Fused::Plan& plan) {
  for (auto& [type, launch] : launches) plan.push_back(std::move(launch));
}

template <class Options, class Kernel>
void queue_adam(const Fused::Plan& plan, const std::optional<at::Tensor>& found, const Kernel& kernel) {
  for (const auto& launch : plan) {
    const auto& options = static_cast<const Options&>(*launch.options);
    const auto [beta1, beta2] = options.betas();
    const auto call = [&, beta1 = beta1, beta2 = beta2](const auto& rate) {
      kernel(launch.parameters, launch.gradients, launch.first, launch.second, /*max_exp_avg_sqs=*/at::TensorList(),
             launch.steps, rate, beta1, beta2, options.weight_decay(), options.eps(), /*amsgrad=*/false,
             /*maximize=*/false, /*grad_scale=*/std::optional<at::Tensor>(), found);
    };
    launch.rate.defined() ? call(launch.rate) : call(options.lr());
  }
}

}  // namespace

void zero_gradients(const std::vector<at::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (!gradients.empty()) at::_foreach_zero_(gradients);
}

// ---- SGD

std::optional<Fused::Plan> FusedSgd::prepare() {
  const auto members_of = [](const torch::optim::OptimizerParamState& state) {
    return std::array{static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer()};
  };
  const bool fits = std::all_of(param_groups_.begin(), param_groups_.end(),
                                [&](const auto& group) { return fits_kernel(group, state_, members_of); });
  if (!fits) return std::nullopt;
  const torch::NoGradGuard no_grad;
  Plan plan;
  for (size_t number = 0; number < param_groups_.size(); ++number) {
    const OptimizerParamGroup& group = param_groups_[number];
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    std::map<at::ScalarType, Launch> begun, fresh;
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const at::Tensor rate = numbers_.rate(parameter.device(), number, options.lr());
      if (options.momentum() == 0) {
        launch_of(begun, parameter, group, rate);
        continue;
      }
      bool is_fresh = false;  // the parameter's first step may come late
      const auto& state = state_of<torch::optim::SGDParamState>(state_, parameter, [&](auto& made) {
        made.momentum_buffer(at::zeros_like(parameter));
        is_fresh = true;
      });
      Launch& launch = launch_of(is_fresh ? fresh : begun, parameter, group, rate);
      launch.first.push_back(state.momentum_buffer());
      launch.is_fresh = is_fresh;
    }
    add_launches(begun, plan);
    add_launches(fresh, plan);
  }
  return plan;
}

void FusedSgd::queue(const Plan& plan) {
  const torch::NoGradGuard no_grad;
  for (const auto& launch : plan) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(*launch.options);
    const auto call = [&](const auto& rate) {
      at::_fused_sgd_(launch.parameters, launch.gradients, launch.first, options.weight_decay(), options.momentum(),
                      rate, options.dampening(), options.nesterov(), /*maximize=*/false, launch.is_fresh,
                      /*grad_scale=*/{}, found());
    };
    launch.rate.defined() ? call(launch.rate) : call(options.lr());
  }
}

torch::Tensor FusedSgd::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const auto plan = prepare();
  plan ? queue(*plan) : void(SGD::step());
  return loss;
}

// ---- Adam and AdamW, which differ in their kernels

namespace {

template <class Options, class State>
std::optional<Fused::Plan> plan_of_adam(const std::vector<OptimizerParamGroup>& groups, States& states,
                                        DeviceNumbers& numbers) {
  if (!fits_adam<Options, State>(groups, states)) return std::nullopt;
  const torch::NoGradGuard no_grad;
  Fused::Plan plan;
  numbers.begin_step();
  for (size_t number = 0; number < groups.size(); ++number) {
    const auto& options = static_cast<const Options&>(groups[number].options());
    std::map<at::ScalarType, Fused::Launch> launches;
    for (const auto& parameter : groups[number].params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = state_of<State>(states, parameter, [&](auto& made) {
        made.exp_avg(at::zeros_like(parameter));
        made.exp_avg_sq(at::zeros_like(parameter));
      });
      state.step(state.step() + 1);
      Fused::Launch& launch =
          launch_of(launches, parameter, groups[number], numbers.rate(parameter.device(), number, options.lr()));
      launch.first.push_back(state.exp_avg());
      launch.second.push_back(state.exp_avg_sq());
      launch.steps.push_back(numbers.count(parameter.device(), state.step()));
    }
    add_launches(launches, plan);
  }
  numbers.end_step();
  return plan;
}

}  // namespace

std::optional<Fused::Plan> FusedAdam::prepare() {
  return plan_of_adam<torch::optim::AdamOptions, torch::optim::AdamParamState>(param_groups_, state_, numbers_);
}

void FusedAdam::queue(const Plan& plan) {
  const torch::NoGradGuard no_grad;
  numbers_.count_up();
  queue_adam<torch::optim::AdamOptions>(plan, found(),
                                        [](const auto&... arguments) { at::_fused_adam_(arguments...); });
}

torch::Tensor FusedAdam::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const auto plan = prepare();
  plan ? queue(*plan) : void(Adam::step());
  return loss;
}

std::optional<Fused::Plan> FusedAdamW::prepare() {
  return plan_of_adam<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(param_groups_, state_, numbers_);
}

void FusedAdamW::queue(const Plan& plan) {
  const torch::NoGradGuard no_grad;
  numbers_.count_up();
  queue_adam<torch::optim::AdamWOptions>(plan, found(),
                                         [](const auto&... arguments) { at::_fused_adamw_(arguments...); });
}

torch::Tensor FusedAdamW::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const auto plan = prepare();
  plan ? queue(*plan) : void(AdamW::step());
  return loss;
}

}  // namespace lockstep
