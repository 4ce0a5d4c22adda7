#include "gradient_hook.hpp"

#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <memory>

namespace lockstep {
namespace {

class CallAfter : public torch::autograd::FunctionPostHook {
 public:
  explicit CallAfter(std::function<void()> function) : function_(std::move(function)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    function_();
    return outputs;
  }

 private:
  const std::function<void()> function_;
};

}  // namespace

GradientHook::GradientHook(const at::Tensor& parameter, std::function<void()> function)
    : accumulator_(torch::autograd::impl::grad_accumulator(parameter)),
      key_(accumulator_->add_post_hook(std::make_unique<CallAfter>(std::move(function)))) {}

GradientHook::~GradientHook() {
  accumulator_->del_post_hook(key_);
}

// A leaf of a living graph has its accumulator.
bool GradientHook::is_behind(const at::TensorImpl& parameter) {
  auto* const impl = const_cast<at::TensorImpl*>(&parameter);
  const at::Tensor tensor(c10::intrusive_ptr<at::TensorImpl>::unsafe_reclaim_from_nonowning(impl));
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
  if (!accumulator) return false;
  const auto& hooks = accumulator->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const auto& hook) { return dynamic_cast<const CallAfter*>(hook.get()) != nullptr; });
}

}  // namespace lockstep
