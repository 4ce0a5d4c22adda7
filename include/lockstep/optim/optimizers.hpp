// Optimizers by name, with the settings that they have in common: LibTorch's SGD, Adam and AdamW, and for large batches
// Lars and Lamb (lars.hpp, lamb.hpp).
//
// Thread-safe for different optimizers.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class OptimizerKind { sgd, adam, adamw, lars, lamb };

// "sgd", "adam", …. optimizer_from converts back. It throws Error, which lists the names, for any other text.
std::string_view to_string(OptimizerKind kind);
OptimizerKind optimizer_from(std::string_view name);

// What the optimizer's own libraries take, where a user names no other: 0.001 for adam and adamw (torch.optim) and lamb
// (timm, Apex), 1 for lars (timm), and for sgd the 0.2 of the book's LeNet. Other networks and batches want others.
double default_learning_rate(OptimizerKind kind);

struct OptimizerSettings {
  std::optional<double> lr = {};  // none: default_learning_rate
  double momentum = 0;            // sgd and lars only; Lars's authors use 0.9
  bool nesterov = false;          // sgd with momentum only
  double weight_decay = 0;  // lambda. sgd, adam, lars: lambda * w is added to the gradient; adamw, lamb: to the update
};

// Throws Error, which says what would do: a setting that is negative or not a number, a momentum of 1 or more, a
// momentum for an optimizer that has no such setting, nesterov without momentum.
void check_optimizer(OptimizerKind kind, const OptimizerSettings& settings);

// Makes an optimizer of that kind. It has its own defaults for what the settings do not have. Throws Error as
// check_optimizer does. Those of sgd, adam and adamw are torch::optim's SGD, Adam and AdamW, with their groups, states,
// save() and load(). But their step is one call of LibTorch's fused kernel for all parameters of a group, where
// torch::optim calls up to 14 operators for each. The results are the same but for rounding.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind, std::vector<torch::Tensor> parameters,
                                                        const OptimizerSettings& settings);
std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind,
                                                        const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                                        const OptimizerSettings& settings);

// A module's parameters in two groups, each once. Group 0: those of two or more dimensions, which weight decay suits.
// Group 1: biases and the weights of norms, which mostly go without. So that these do not decay:
//   auto adamw = make_optimizer(OptimizerKind::adamw, decay_groups(*net), {.lr = 1e-3, .weight_decay = 0.1});
//   set_weight_decay(adamw->param_groups()[1], 0);
std::vector<torch::optim::OptimizerParamGroup> decay_groups(const torch::nn::Module& module);

// Sets the weight decay of one group of an optimizer, from the next step on. (Options that are given with a group are
// another matter: LibTorch 2.15 takes those that have their class's default value, such as 0, for not given.) Throws
// Error for a number below 0, and for an optimizer that is none of LibTorch's or lockstep's, or has no weight decay.
void set_weight_decay(torch::optim::OptimizerParamGroup& group, double weight_decay);

// Sets the learning rate of all parameter groups, from the next step on.
void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// Whether the optimizer scales a layer's update by the layer's norm. It then needs whole layers, not slices on several
// ranks.
bool needs_whole_layers(OptimizerKind kind);

// "sgd", "lars, momentum 0.9, weight decay 1e-04".
std::string to_string(OptimizerKind kind, const OptimizerSettings& settings);

}  // namespace lockstep
