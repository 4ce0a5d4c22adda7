#include "fused_optimizers.hpp"

#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
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

// ---- SGD

struct SgdTensors {
  std::vector<at::Tensor> parameters, gradients, buffers;
};

void step_sgd(const SgdTensors& tensors, const torch::optim::SGDOptions& options, bool is_first_step) {
  at::_fused_sgd_(tensors.parameters, tensors.gradients, tensors.buffers, options.weight_decay(), options.momentum(),
                  options.lr(), options.dampening(), options.nesterov(), /*maximize=*/false, is_first_step);
}

// Makes a parameter's buffer at the parameter's first step, which may come late.
void step_group(const OptimizerParamGroup& group, States& states) {
  const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
  std::map<at::ScalarType, SgdTensors> begun, fresh;
  for (const auto& parameter : group.params()) {
    if (!parameter.grad().defined()) continue;
    auto* of_types = &begun;
    at::Tensor buffer;
    if (options.momentum() != 0) {
      auto& state = states[parameter.unsafeGetTensorImpl()];
      if (!state) {
        auto made = std::make_unique<torch::optim::SGDParamState>();
        made->momentum_buffer(at::empty_like(parameter));
        state = std::move(made);
        of_types = &fresh;
      }
      buffer = static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer();
    }
    SgdTensors& tensors = (*of_types)[parameter.scalar_type()];
    if (buffer.defined()) tensors.buffers.push_back(buffer);
    tensors.parameters.push_back(parameter);
    tensors.gradients.push_back(parameter.grad());
  }
  for (const auto& [type, tensors] : begun) step_sgd(tensors, options, /*is_first_step=*/false);
  for (const auto& [type, tensors] : fresh) step_sgd(tensors, options, /*is_first_step=*/true);
}

// ---- Adam and AdamW, which differ in their kernels

// Keeps counts of steps as tensors on a device, as the kernels read them. Parameters share the tensor of a count.
class StepCounts {
 public:
  const at::Tensor& tensor(int64_t count, const c10::Device& device) {
    at::Tensor& kept = tensors_[{count, device.index()}];
    if (!kept.defined()) {
      kept = at::full({}, static_cast<double>(count), at::TensorOptions(device).dtype(at::kFloat));
    }
    return kept;
  }

 private:
  std::map<std::pair<int64_t, c10::DeviceIndex>, at::Tensor> tensors_;
};

struct AdamTensors {
  std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
};

template <class State>
State& adam_state(std::unique_ptr<torch::optim::OptimizerParamState>& kept, const at::Tensor& parameter) {
  if (!kept) {
    auto state = std::make_unique<State>();
    state->exp_avg(at::zeros_like(parameter));
    state->exp_avg_sq(at::zeros_like(parameter));
    kept = std::move(state);
  }
  return static_cast<State&>(*kept);
}

template <class Options, class State, class Kernel>
void step_group(const OptimizerParamGroup& group, States& states, StepCounts& counts, const Kernel& kernel) {
  const auto& options = static_cast<const Options&>(group.options());
  std::map<at::ScalarType, AdamTensors> of_types;
  for (const auto& parameter : group.params()) {
    if (!parameter.grad().defined()) continue;
    auto& [parameters, gradients, averages, squares, steps] = of_types[parameter.scalar_type()];
    auto& state = adam_state<State>(states[parameter.unsafeGetTensorImpl()], parameter);
    state.step(state.step() + 1);
    parameters.push_back(parameter);
    gradients.push_back(parameter.grad());
    averages.push_back(state.exp_avg());
    squares.push_back(state.exp_avg_sq());
    steps.push_back(counts.tensor(state.step(), parameter.device()));
  }
  const auto [beta1, beta2] = options.betas();
  for (const auto& [type, of] : of_types) {
    kernel(of.parameters, of.gradients, of.averages, of.squares, /*max_exp_avg_sqs=*/at::TensorList(), of.steps,
           options.lr(), beta1, beta2, options.weight_decay(), options.eps(), /*amsgrad=*/false, /*maximize=*/false);
  }
}

// Returns false, and does nothing, if the kernel cannot take all groups.
template <class Options, class State, class Kernel>
bool step_groups(const std::vector<OptimizerParamGroup>& groups, States& states, const Kernel& kernel) {
  const auto members_of = [](const torch::optim::OptimizerParamState& kept) {
    const auto& state = static_cast<const State&>(kept);
    return std::array{state.exp_avg(), state.exp_avg_sq()};
  };
  const bool fits = std::all_of(groups.begin(), groups.end(), [&](const auto& group) {
    return !static_cast<const Options&>(group.options()).amsgrad() && fits_kernel(group, states, members_of);
  });
  if (!fits) return false;
  const torch::NoGradGuard no_grad;
  StepCounts counts;
  for (const auto& group : groups) step_group<Options, State>(group, states, counts, kernel);
  return true;
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

torch::Tensor FusedSgd::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const auto members_of = [](const torch::optim::OptimizerParamState& state) {
    return std::array{static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer()};
  };
  const bool fits = std::all_of(param_groups_.begin(), param_groups_.end(),
                                [&](const auto& group) { return fits_kernel(group, state_, members_of); });
  if (!fits) {
    SGD::step();
    return loss;
  }
  const torch::NoGradGuard no_grad;
  for (const auto& group : param_groups_) step_group(group, state_);
  return loss;
}

torch::Tensor FusedAdam::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const auto kernel = [](const auto&... arguments) { at::_fused_adam_(arguments...); };
  if (!step_groups<torch::optim::AdamOptions, torch::optim::AdamParamState>(param_groups_, state_, kernel)) {
    Adam::step();
  }
  return loss;
}

torch::Tensor FusedAdamW::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const auto kernel = [](const auto&... arguments) { at::_fused_adamw_(arguments...); };
  if (!step_groups<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(param_groups_, state_, kernel)) {
    AdamW::step();
  }
  return loss;
}

}  // namespace lockstep
