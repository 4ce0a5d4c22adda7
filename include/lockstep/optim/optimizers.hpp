// Optimizers by their names, with the settings that they have in common: LibTorch's SGD, Adam and AdamW, and Lars and
// Lamb for large batches (lars.hpp, lamb.hpp).
//
// Thread-safe for different optimizers.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class OptimizerKind { sgd, adam, adamw, lars, lamb };

// "sgd", "adam", … And back; throws Error that names what there is.
std::string_view to_string(OptimizerKind kind);
OptimizerKind optimizer_from(std::string_view name);

struct OptimizerSettings {
  double lr = 0.2;
  double momentum = 0;      // of sgd and lars alone; Lars's authors have 0.9
  bool nesterov = false;    // of sgd with momentum
  double weight_decay = 0;  // sgd, adam, lars: lambda * w is added to the gradient; adamw, lamb: beside it
};

// Throws Error, which says what would do: a setting that is negative or not a number, a momentum of 1 or more, a
// momentum for an optimizer that has no such setting, nesterov without momentum.
void check_optimizer(OptimizerKind kind, const OptimizerSettings& settings);

// An optimizer of that kind, with defaults where the settings say nothing. Throws Error as check_optimizer does.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind, std::vector<torch::Tensor> parameters,
                                                        const OptimizerSettings& settings);

// Of all parameter groups, from the next step on.
void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// Does it scale a layer's update by the layer's norm? Then it needs whole layers, not slices of them on several ranks.
bool needs_whole_layers(OptimizerKind kind);

// "sgd", "lars, momentum 0.9, weight decay 1e-04".
std::string to_string(OptimizerKind kind, const OptimizerSettings& settings);

}  // namespace lockstep
