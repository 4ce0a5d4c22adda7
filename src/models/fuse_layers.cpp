#include <ATen/autocast_mode.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <lockstep/models/conv_relu_pool.hpp>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/linear.hpp>

#include "batch_norm_relu.hpp"
#include "conv2d.hpp"
#include "cpu_linear.hpp"
#include "linear_products.hpp"

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <typeinfo>
#include <variant>
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

// ---- Layers in the place of LibTorch's -----------------------------------------------------------------------------

// Computes Kind::compute(layer, x). In all else it is as the given layer. Both share the tensors.
template <class Kind>
class Fused : public Kind::Layer {
 public:
  using Layer = typename Kind::Layer;
  explicit Fused(const Layer& layer) : Layer(layer) {}
  at::Tensor forward(const at::Tensor& x) { return Kind::compute(*this, x); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device) const override {
    return std::make_shared<Fused>(dynamic_cast<const Layer&>(*Layer::clone(device)));
  }
  void pretty_print(std::ostream& out) const override { Layer::pretty_print(out << Kind::name << ": "); }
};

struct LinearRelu {
  using Layer = torch::nn::LinearImpl;
  static constexpr auto name = "lockstep::LinearRelu";
  static at::Tensor compute(Layer& layer, const at::Tensor& x) { return linear_relu(x, layer.weight, layer.bias); }
};

struct FusedConv2d {
  using Layer = torch::nn::Conv2dImpl;
  static constexpr auto name = "lockstep::Conv2d";
  static at::Tensor compute(Layer& layer, const at::Tensor& x) { return fast_conv2d(layer, x); }
};

struct FusedConvReluPool {
  using Layer = torch::nn::Conv2dImpl;
  static constexpr auto name = "lockstep::ConvReluPool";
  static at::Tensor compute(Layer& layer, const at::Tensor& x) {
    if (x.dim() != 4) return at::avg_pool2d(layer.forward(x).relu_(), /*kernel_size=*/2);  // one image without a batch
    return conv_relu_pool(x, layer.weight, layer.bias);
  }
};

struct BatchNormRelu {
  using Layer = torch::nn::BatchNorm2dImpl;
  static constexpr auto name = "lockstep::BatchNormRelu";
  static at::Tensor compute(Layer& layer, const at::Tensor& x) { return batch_norm_relu(layer, x); }
};

template <class... Types>
bool is_exactly(const torch::nn::Module& module) {
  return ((typeid(module) == typeid(Types)) || ...);
}

bool all_are(int64_t value, const torch::ExpandingArray<2>& values) {
  return values->at(0) == value && values->at(1) == value;
}

bool is_pool_of_two(const torch::nn::Module& module) {
  if (!is_exactly<torch::nn::AvgPool2dImpl>(module)) return false;
  const auto& options = dynamic_cast<const torch::nn::AvgPool2dImpl&>(module).options;
  return all_are(2, options.kernel_size()) && all_are(2, options.stride()) && all_are(0, options.padding()) &&
         !options.ceil_mode() && !options.divisor_override().value_or(0);
}

// With more channels LibTorch's convolution is as fast as conv_relu_pool().
constexpr int64_t kFewChannels = 64;

bool suits_pool(const torch::nn::Conv2dImpl& conv) {
  const auto& options = conv.options;
  const auto* const padding = std::get_if<torch::ExpandingArray<2>>(&options.padding());
  return padding != nullptr && all_are(0, *padding) && all_are(1, options.stride()) && all_are(1, options.dilation()) &&
         options.groups() == 1 && options.in_channels() < kFewChannels && options.out_channels() < kFewChannels;
}

int64_t fuse_layers_of(torch::nn::SequentialImpl& net) {
  const std::vector<std::string> names = net.named_children().keys();
  const auto put = [&](size_t place, const auto& layer) {
    *(net.begin() + static_cast<int64_t>(place)) = torch::nn::AnyModule(layer);
    net.replace_module(names[place], layer);
  };
  const auto fuse = [&]<class Kind>(Kind, size_t place, size_t followers) {
    put(place, std::make_shared<Fused<Kind>>(dynamic_cast<const typename Kind::Layer&>(*net.ptr(place))));
    for (size_t i = 1; i <= followers; ++i) put(place + i, std::make_shared<torch::nn::IdentityImpl>());
  };
  int64_t saved = 0;
  for (size_t place = 0; place < names.size(); ++place) {
    const auto layer = net.ptr(place);
    const bool relu = place + 1 < names.size() && is_exactly<torch::nn::ReLUImpl>(*net.ptr(place + 1));
    const bool pool = relu && place + 2 < names.size() && is_pool_of_two(*net.ptr(place + 2));
    if (relu && is_exactly<torch::nn::LinearImpl, FastLinearImpl>(*layer) &&
        layer->as<torch::nn::LinearImpl>()->bias.defined()) {
      fuse(LinearRelu(), place, 1);
      ++saved;
    } else if (is_exactly<torch::nn::LinearImpl>(*layer)) {
      put(place, std::make_shared<FastLinearImpl>(*layer->as<torch::nn::LinearImpl>()));
    } else if (is_exactly<torch::nn::Conv2dImpl>(*layer)) {
      if (pool && suits_pool(*layer->as<torch::nn::Conv2dImpl>())) {
        fuse(FusedConvReluPool(), place, 2);
      } else {
        fuse(FusedConv2d(), place, 0);
      }
    } else if (relu && is_exactly<torch::nn::BatchNorm2dImpl>(*layer)) {
      fuse(BatchNormRelu(), place, 1);
    }
  }
  return saved;
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
  int64_t saved = 0;
  for (const auto& module : net.modules(/*include_self=*/false)) {
    if (auto* const inner = dynamic_cast<torch::nn::SequentialImpl*>(module.get())) saved += fuse_layers_of(*inner);
  }
  if (auto* const self = dynamic_cast<torch::nn::SequentialImpl*>(&net)) saved += fuse_layers_of(*self);
  return saved;
}

}  // namespace lockstep
