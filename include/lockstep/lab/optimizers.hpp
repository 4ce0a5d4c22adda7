// Makes optimizers by name, with the settings that they have in common: LibTorch's SGD, Adam and AdamW, and for large
// batches Lars and Lamb (lars.hpp, lamb.hpp).
//
// The functions are thread-safe for different optimizers.
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

// Gives the names "sgd", "adam", …. optimizer_from converts back, and throws Error, which lists the names, for any
// other text.
std::string_view to_string(OptimizerKind kind);
OptimizerKind optimizer_from(std::string_view name);

// Gives the optimizer's learning rate if a user names none. It is 0.001 for adam and adamw (torch.optim) and lamb
// (timm, Apex), and 1 for lars (timm). For sgd it is the 0.2 of the book's LeNet. Other networks and batches want
// others.
double default_learning_rate(OptimizerKind kind);

struct OptimizerSettings {
  std::optional<double> lr = {};  // none: default_learning_rate
  double momentum = 0;            // sgd and lars only; Lars's authors use 0.9
  bool nesterov = false;          // sgd with momentum only
  double weight_decay = 0;  // lambda. sgd, adam, lars: lambda * w is added to the gradient; adamw, lamb: to the update
};

// Throws Error, which names a remedy: a setting is negative or not a number; a momentum is 1 or more; the optimizer has
// no such setting as momentum; nesterov stands without momentum.
void check_optimizer(OptimizerKind kind, const OptimizerSettings& settings);

// Makes an optimizer of that kind, which keeps its own defaults where the settings say nothing. Throws Error as
// check_optimizer does. For sgd, adam and adamw it is torch::optim's SGD, Adam or AdamW, with groups, states, save()
// and load(). But a step is one call of LibTorch's fused kernel for all parameters of a group. (torch::optim calls up
// to 14 operators for each.) The results are the same but for rounding.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind,
                                                        const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                                        const OptimizerSettings& settings);

// Sets the learning rate of all parameter groups, from the next step on.
void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// Tells whether the optimizer scales a layer's update by the layer's norm. It then needs whole layers, not slices on
// several ranks.
bool needs_whole_layers(OptimizerKind kind);

// Describes the optimizer: "sgd", "lars, momentum 0.9, weight decay 1e-04".
std::string to_string(OptimizerKind kind, const OptimizerSettings& settings);

}  // namespace lockstep
