#include "gradient_hook.hpp"

#include <torch/csrc/autograd/function_hook.h>

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

}  // namespace lockstep
