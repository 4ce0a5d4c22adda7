#include <ATen/autocast_mode.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/linear.hpp>

#include "cpu_linear.hpp"
#include "linear_products.hpp"

#include <memory>
#include <ostream>
#include <string>
#include <typeinfo>
#include <vector>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The product's kernel adds the bias and applies ReLU, where it may (cuBLASLt's epilogue). LibTorch gives the operator
// no gradient.
class FusedLinearRelu : public torch::autograd::Function<FusedLinearRelu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias) {
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    const at::Tensor y = at::_unsafe_view(at::_addmm_activation(bias, rows_of(x), weight.t()), sizes);
    ctx->save_for_backward({x, weight, y});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &y = saved[2];
    variable_list gradients(3);
    if (!grads[0].defined()) return gradients;
    const at::Tensor grad = rows_of(at::threshold_backward(grads[0], y, 0));
    if (ctx->needs_input_grad(0)) gradients[0] = grad.mm(weight).view(x.sizes());
    if (ctx->needs_input_grad(1)) gradients[1] = grad.t().mm(rows_of(x));
    if (ctx->needs_input_grad(2)) gradients[2] = grad.sum(0);
    return gradients;
  }
};

class LinearReluImpl : public torch::nn::Cloneable<LinearReluImpl> {
 public:
  explicit LinearReluImpl(const torch::nn::LinearImpl& linear) : options_(linear.options) {
    weight = register_parameter("weight", linear.weight, linear.weight.requires_grad());
    bias = register_parameter("bias", linear.bias, linear.bias.requires_grad());
    train(linear.is_training());
  }

  at::Tensor forward(const at::Tensor& x) { return linear_relu(x, weight, bias); }
  void reset() override {
    const torch::nn::Linear fresh(options_);
    weight = register_parameter("weight", fresh->weight);
    bias = register_parameter("bias", fresh->bias);
  }
  void pretty_print(std::ostream& out) const override {
    out << "lockstep::LinearRelu(" << options_.in_features() << ", " << options_.out_features() << ")";
  }

  at::Tensor weight, bias;

 private:
  torch::nn::LinearOptions options_;
};

template <class... Types>
bool is_exactly(const torch::nn::Module& module) {
  return ((typeid(module) == typeid(Types)) || ...);
}

bool can_fuse(const torch::nn::Module& layer, const torch::nn::Module& next) {
  return is_exactly<torch::nn::LinearImpl, FastLinearImpl>(layer) && is_exactly<torch::nn::ReLUImpl>(next) &&
         dynamic_cast<const torch::nn::LinearImpl&>(layer).bias.defined();
}

int64_t fuse_layers_of(torch::nn::SequentialImpl& net) {
  const std::vector<std::string> names = net.named_children().keys();
  const auto put = [&](size_t place, const auto& layer) {
    *(net.begin() + static_cast<int64_t>(place)) = torch::nn::AnyModule(layer);
    net.replace_module(names[place], layer);
  };
  int64_t fused = 0;
  for (size_t place = 0; place + 1 < names.size(); ++place) {
    const auto layer = net.ptr(place);
    if (!can_fuse(*layer, *net.ptr(place + 1))) continue;
    put(place, std::make_shared<LinearReluImpl>(dynamic_cast<const torch::nn::LinearImpl&>(*layer)));
    put(place + 1, std::make_shared<torch::nn::IdentityImpl>());
    ++fused;
  }
  return fused;
}

}  // namespace

at::Tensor linear_relu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool fits = x.is_cuda() && x.dim() >= 2 && x.numel() > 0 && weight.dim() == 2 && bias.dim() == 1;
  if (!fits) {
    return suits_cpu_linear(x, weight, bias) ? cpu_linear(x, weight, bias, /*relu=*/true)
                                             : at::relu(at::linear(x, weight, bias));  // its errors say more
  }
  const auto type = x.device().type();
  if (!at::autocast::is_autocast_enabled(type)) return FusedLinearRelu::apply(x, weight, bias);
  const auto cast = [&, to = at::autocast::get_autocast_dtype(type)](const at::Tensor& tensor) {
    return at::autocast::cached_cast(to, tensor, type);
  };
  return FusedLinearRelu::apply(cast(x), cast(weight), cast(bias));
}

int64_t fuse_layers(torch::nn::Module& net) {
  int64_t fused = 0;
  for (const auto& module : net.modules(/*include_self=*/false)) {
    if (auto* const inner = dynamic_cast<torch::nn::SequentialImpl*>(module.get())) fused += fuse_layers_of(*inner);
  }
  if (auto* const self = dynamic_cast<torch::nn::SequentialImpl*>(&net)) fused += fuse_layers_of(*self);
  return fused;
}

}  // namespace lockstep
