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
#include <tuple>
#include <type_traits>

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

// A rate on the device is a float, by which float64 would lose its digits.
bool takes_rate_from_host(const at::Tensor& parameter) {
  return parameter.is_cpu() || parameter.scalar_type() == at::kDouble;
}

// These are the arguments of one call. Each type of a group has its own.
struct Launch {
  std::vector<at::Tensor> parameters, gradients, first, second, steps;
};

}  // namespace

void zero_gradients(const std::vector<at::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (!gradients.empty()) at::_foreach_zero_(gradients);
}

// ---- A step.

void Fused::forget_step() {
  numbers_.forget_step();
  uncount(replayed());
}

bool Fused::can_be_recorded() const {
  return by_kernels_ && std::none_of(last_.begin(), last_.end(), [](const Stepped& stepped) {
           return stepped.parameter.scalar_type() == at::kDouble;
         });
}

void Fused::before_replay() {
  const torch::NoGradGuard no_grad;
  numbers_.keep();
  count(replayed());
  is_prepared_ = true;
}

Fused::Held Fused::held() const {
  Held held{.states = states_of(replayed())};
  for (const auto& group : groups()) held.options.push_back(group.options().clone());
  return held;
}

bool Fused::has(const Held& held) const {
  for (size_t number = 0; number < held.options.size(); ++number) {
    const auto now = groups()[number].options().clone();
    now->set_lr(held.options[number]->get_lr());
    if (!are_equal(*now, *held.options[number])) return false;
  }
  const std::vector<at::Tensor> states = states_of(replayed());
  return std::equal(states.begin(), states.end(), held.states.begin(), held.states.end(),
                    [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
}

bool Fused::step_by_kernels() {
  const torch::NoGradGuard no_grad;
  by_kernels_ = is_prepared_ || fits();
  if (!by_kernels_) return false;
  std::vector<Stepped> now;
  for (size_t number = 0; number < groups().size(); ++number) {
    for (const auto& parameter : groups()[number].params()) {
      if (parameter.grad().defined()) now.push_back({number, parameter});
    }
  }
  // A check for NaN reads the last gradients last, so caches have them. Forward reads the first weights first.
  std::reverse(now.begin(), now.end());
  if (std::exchange(is_prepared_, false)) {
    const auto is_same = [](const Stepped& a, const Stepped& b) { return a.parameter.is_same(b.parameter); };
    if (!std::equal(now.begin(), now.end(), replayed().begin(), replayed().end(), is_same)) {
      throw Error("the step that is recorded has gradients of " + std::to_string(now.size()) +
                  " parameters, and not of the same ones as the step before, which had " +
                  std::to_string(replayed().size()) + "; record a network that uses the same parameters in each step");
    }
    recorded_ = now;
  } else {
    last_ = now;
    count(now);
  }
  queue(now);
  return true;
}

// ---- SGD

bool FusedSgd::fits() const {
  const auto members_of = [](const torch::optim::OptimizerParamState& state) {
    return std::array{static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer()};
  };
  return std::all_of(param_groups_.begin(), param_groups_.end(),
                     [&](const auto& group) { return fits_kernel(group, state_, members_of); });
}

std::vector<at::Tensor> FusedSgd::states_of(const std::vector<Stepped>& all) const {
  std::vector<at::Tensor> states;
  for (const auto& [number, parameter] : all) {
    const auto found = state_.find(parameter.unsafeGetTensorImpl());
    if (found == state_.end()) continue;
    states.push_back(static_cast<const torch::optim::SGDParamState&>(*found->second).momentum_buffer());
  }
  return states;
}

// A parameter's first step may come late.
void FusedSgd::count(const std::vector<Stepped>& all) {
  fresh_.clear();
  for (const auto& [number, parameter] : all) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(param_groups_[number].options());
    numbers_.set_rate(parameter.device(), number, options.lr());
    if (options.momentum() == 0) continue;
    state_of<torch::optim::SGDParamState>(state_, parameter, [this, &parameter = parameter](auto& made) {
      made.momentum_buffer(at::zeros_like(parameter));
      fresh_.insert(parameter.unsafeGetTensorImpl());
    });
  }
}

void FusedSgd::queue(const std::vector<Stepped>& all) {
  std::map<std::tuple<size_t, at::ScalarType, bool>, Launch> launches;
  for (const auto& [number, parameter] : all) {
    auto* const key = parameter.unsafeGetTensorImpl();
    Launch& launch = launches[{number, parameter.scalar_type(), fresh_.contains(key)}];
    launch.parameters.push_back(parameter);
    launch.gradients.push_back(parameter.grad());
    if (static_cast<const torch::optim::SGDOptions&>(param_groups_[number].options()).momentum() == 0) continue;
    launch.first.push_back(static_cast<const torch::optim::SGDParamState&>(*state_.at(key)).momentum_buffer());
  }
  for (const auto& [place, launch] : launches) {
    const auto& [number, type, is_fresh] = place;
    const auto& options = static_cast<const torch::optim::SGDOptions&>(param_groups_[number].options());
    const auto call = [&, of = &launch, is_first_step = is_fresh](const auto& rate) {
      at::_fused_sgd_(of->parameters, of->gradients, of->first, options.weight_decay(), options.momentum(), rate,
                      options.dampening(), options.nesterov(), /*maximize=*/false, is_first_step,
                      /*grad_scale=*/{}, found());
    };
    takes_rate_from_host(launch.parameters[0]) ? call(options.lr()) : call(numbers_.rate(number));
  }
}

torch::Tensor FusedSgd::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  if (!step_by_kernels()) SGD::step();
  return loss;
}

// ---- Adam and AdamW, which differ in their kernels

template <class Base, class Options, class State>
std::vector<at::Tensor> FusedAdamOf<Base, Options, State>::states_of(const std::vector<Stepped>& all) const {
  std::vector<at::Tensor> states;
  for (const auto& [number, parameter] : all) {
    const auto found = this->state_.find(parameter.unsafeGetTensorImpl());
    if (found == this->state_.end()) continue;
    const auto& state = static_cast<const State&>(*found->second);
    states.insert(states.end(), {state.exp_avg(), state.exp_avg_sq()});
  }
  return states;
}

template <class Base, class Options, class State>
bool FusedAdamOf<Base, Options, State>::fits() const {
  const auto members_of = [](const torch::optim::OptimizerParamState& kept) {
    const auto& state = static_cast<const State&>(kept);
    return std::array{state.exp_avg(), state.exp_avg_sq()};
  };
  return std::all_of(groups().begin(), groups().end(), [&](const auto& group) {
    return !static_cast<const Options&>(group.options()).amsgrad() && fits_kernel(group, this->state_, members_of);
  });
}

template <class Base, class Options, class State>
void FusedAdamOf<Base, Options, State>::count(const std::vector<Stepped>& all) {
  numbers_.begin_step();
  for (const auto& [number, parameter] : all) {
    auto& state = state_of<State>(this->state_, parameter, [&parameter = parameter](auto& made) {
      made.exp_avg(at::zeros_like(parameter));
      made.exp_avg_sq(at::zeros_like(parameter));
    });
    state.step(state.step() + 1);
    numbers_.set_rate(parameter.device(), number, static_cast<const Options&>(groups()[number].options()).lr());
    numbers_.set_count(parameter.device(), state.step());
  }
  numbers_.end_step();
}

template <class Base, class Options, class State>
void FusedAdamOf<Base, Options, State>::queue(const std::vector<Stepped>& all) {
  const auto kernel = [](const auto&... arguments) {
    if constexpr (std::is_same_v<Base, torch::optim::Adam>) {
      at::_fused_adam_(arguments...);
    } else {
      at::_fused_adamw_(arguments...);
    }
  };
  numbers_.count_up();
  std::map<std::pair<size_t, at::ScalarType>, Launch> launches;
  for (const auto& [number, parameter] : all) {
    Launch& launch = launches[{number, parameter.scalar_type()}];
    const auto& state = static_cast<const State&>(*this->state_.at(parameter.unsafeGetTensorImpl()));
    launch.parameters.push_back(parameter);
    launch.gradients.push_back(parameter.grad());
    launch.first.push_back(state.exp_avg());
    launch.second.push_back(state.exp_avg_sq());
    launch.steps.push_back(numbers_.count(parameter.device(), state.step()));
  }
  for (const auto& [place, launch] : launches) {
    const auto& options = static_cast<const Options&>(groups()[place.first].options());
    const auto [beta1, beta2] = options.betas();
    const auto call = [&, of = &launch, beta1 = beta1, beta2 = beta2](const auto& rate) {
      kernel(of->parameters, of->gradients, of->first, of->second, /*max_exp_avg_sqs=*/at::TensorList(), of->steps,
             rate, beta1, beta2, options.weight_decay(), options.eps(), /*amsgrad=*/false, /*maximize=*/false,
             /*grad_scale=*/std::optional<at::Tensor>(), found());
    };
    takes_rate_from_host(launch.parameters[0]) ? call(options.lr()) : call(numbers_.rate(place.first));
  }
  if (counts_back()) numbers_.count_back(*found());
}

template <class Base, class Options, class State>
void FusedAdamOf<Base, Options, State>::uncount(const std::vector<Stepped>& all) {
  for (const auto& [number, parameter] : all) {
    auto& state = static_cast<State&>(*this->state_.at(parameter.unsafeGetTensorImpl()));
    state.step(state.step() - 1);
  }
}

template <class Base, class Options, class State>
torch::Tensor FusedAdamOf<Base, Options, State>::step(torch::optim::Optimizer::LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  if (!step_by_kernels()) Base::step();
  return loss;
}

template class FusedAdamOf<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState>;
template class FusedAdamOf<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

}  // namespace lockstep
