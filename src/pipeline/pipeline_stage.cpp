#include "pipeline_stage.hpp"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "base/exception_text.hpp"
#include "comm/arguments.hpp"
#include "nn/weighed_backward.hpp"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

namespace lockstep {

using comm::describe;

namespace {

// Gives a stage's input as the layers see it: the same memory, but not a leaf, so that a layer may work in place.
struct Entrance : torch::autograd::Function<Entrance> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.variable_data(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

at::Tensor enter(const at::Tensor& x) {
  return x.requires_grad() ? Entrance::apply(x) : x;
}

// Restores the values of buffers. Uses variable_data, since autograd has noted a BatchNorm's buffers and must not see
// these change. Autograd does not read them after the forward of training.
class BuffersStay {
 public:
  explicit BuffersStay(const torch::nn::Sequential& layers) {
    for (const auto& buffer : layers->buffers()) kept_.emplace_back(buffer, buffer.detach().clone());
  }
  ~BuffersStay() {
    const c10::NoGradGuard no_grad;
    for (const auto& [buffer, value] : kept_) buffer.variable_data().copy_(value);
  }
  BuffersStay& operator=(BuffersStay&&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

}  // namespace

PipelineStage::PipelineStage(int index, torch::nn::Sequential layers)
    : index_(index), needs_input_gradient_(index > 0), layers_(std::move(layers)) {
  for (const auto& child : layers_->named_children()) names_.push_back(child.key());
}

at::Tensor PipelineStage::through(at::Tensor x) {
  size_t place = 0;
  for (auto& layer : *layers_) {
    const std::string before = describe(x);
    try {
      x = layer.forward(std::move(x));
    } catch (const std::exception&) {
      std::throw_with_nested(Error("Pipeline: layer " + names_[place] + " of stage " + std::to_string(index_) + ", " +
                                       classic_text(*layer.ptr()) + ", fails at what comes to it, " + before + ": " +
                                       exception_text(std::current_exception()),
                                   data_of(std::current_exception())));
    }
    ++place;
  }
  return x;
}

at::Tensor PipelineStage::result_of(const Head& head, at::Tensor x) {
  const at::Tensor output = through(std::move(x));
  return head ? head(output) : output;
}

at::Tensor PipelineStage::forward(int microbatch, const at::Tensor& x, const Head& head, bool keep_graph) {
  Kept kept{x.detach(), {}, head};
  if (needs_input_gradient_) kept.input.requires_grad_();
  at::Tensor result;
  if (keep_graph) {
    result = kept.output = result_of(head, enter(kept.input));
  } else {
    const c10::NoGradGuard no_grad;
    result = result_of(head, kept.input.clone());  // a layer may work in place, and the input is needed again
  }
  kept_[microbatch] = std::move(kept);
  return result.detach();
}

at::Tensor PipelineStage::backward(int microbatch, const at::Tensor& gradient, double weight,
                                   const std::vector<Root>& lent) {
  const auto found = kept_.find(microbatch);
  Kept kept = std::move(found->second);
  kept_.erase(found);
  if (!kept.output.defined()) {
    const BuffersStay stay(layers_);
    kept.output = result_of(kept.head, enter(kept.input));
  }
  if (kept.output.requires_grad()) {
    if (!needs_input_gradient_ && layers_->parameters().empty()) {  // the stage after it gives zeros
      throw Error("Pipeline: stage " + std::to_string(index_) +
                  " has no parameters, but computes with a tensor that wants a gradient. Register that as a parameter");
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    torch::autograd::variable_list roots{kept.output};
    std::optional<WeighedBackward> weighed;
    if (kept.head) weighed.emplace(kept.output, weight, *layers_);
    torch::autograd::variable_list gradients{weighed ? weighed->seed() : gradient};
    for (const auto& [parameter, of_borrowers] : lent) {
      // The root is a view of the parameter, so that autograd adds up both gradients before adding them to .grad.
      roots.push_back(parameter.view_as(parameter));
      gradients.push_back(of_borrowers);
    }
    torch::autograd::backward(roots, gradients);
  } else if (kept.head) {
    refuse_loss_without_graph();
  }
  if (index_ == 0) return {};
  const at::Tensor& of_input = kept.input.grad();
  return of_input.defined() ? of_input : at::zeros_like(kept.input);
}

// A loss may lack a graph if there is nothing to train.
void PipelineStage::refuse_loss_without_graph() const {
  const auto parameters = layers_->parameters();
  const bool trains =
      std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) { return p.requires_grad(); });
  if (!needs_input_gradient_ && !trains) return;
  throw Error(
      "Pipeline: no parameter leads to the last stage's loss: the criterion was computed under NoGradGuard or "
      "InferenceMode, or from detached tensors or item(). Compute it from the net's output, with gradients on");
}

}  // namespace lockstep
