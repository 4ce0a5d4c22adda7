#include "processor_kind.hpp"

#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "base/number_text.hpp"
#include "base/scramble.hpp"
#include "cuda_info.hpp"
#include "micro_kernel.hpp"
#include "one_thread.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace lockstep {
namespace {

// Makes exact numbers from -1 to below 1, the same on every processor.
at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed) {
  at::Tensor tensor = at::empty(sizes, at::kFloat);
  auto* const values = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i)
    values[i] = static_cast<float>(mix({seed, static_cast<uint64_t>(i)}) >> 40) * 0x1p-23F - 1;
  return tensor;
}

class ResultHash {
 public:
  void add(const at::Tensor& result) {
    const at::Tensor values = result.to(at::kDouble).contiguous();
    for (int64_t i = 0; i < values.numel(); ++i) add(values.const_data_ptr<double>()[i]);
  }
  void add(double result) {
    uint64_t bits = 0;
    std::memcpy(&bits, &result, sizeof bits);
    hash_ = mix({hash_, bits});
  }
  std::string text() const { return hex_text(hash_ >> 32, 8); }

 private:
  uint64_t hash_ = 0;
};

// Long sums show the blocks in which a library adds. The blocks depend on the caches too.
void add_products(ResultHash& hash) {
  const at::Tensor a = numbers({24, 1500}, 1), b = numbers({1500, 24}, 2);
  hash.add(at::mm(a, b));
  hash.add(at::mm(b.t(), a.t()));
  hash.add(at::mm(a.slice(1, 0, 40).t(), a));
  hash.add(at::addmm(numbers({72}, 3), numbers({50, 100}, 4), numbers({72, 100}, 5).t()));
  hash.add(at::bmm(numbers({3, 20, 33}, 6), numbers({3, 33, 20}, 7)));
  hash.add(at::mm(a, b.slice(1, 0, 1)));
  hash.add(at::mm(a.to(at::kDouble), b.to(at::kDouble)));
}

void add_micro_kernel(ResultHash& hash) {
  const at::Tensor a = numbers({24, 1500}, 1), b = numbers({1500, 24}, 2), c = at::empty({24, 24}, at::kFloat);
  multiply(24, 24, 1500, a.const_data_ptr<float>(), 1500, b.const_data_ptr<float>(), 24, c.mutable_data_ptr<float>(),
           24, /*adds=*/false);
  hash.add(c);
}

void add_convolutions(ResultHash& hash) {
  const at::Tensor images = numbers({2, 3, 14, 14}, 8), first = numbers({8, 3, 5, 5}, 9), bias = numbers({8}, 10);
  const at::Tensor hidden = at::conv2d(images, first, bias, /*stride=*/1, /*padding=*/2);
  const at::Tensor second = numbers({16, 8, 3, 3}, 11);
  const at::Tensor out = at::conv2d(hidden, second);
  const auto [to_hidden, to_second, to_bias] =
      at::convolution_backward(numbers(out.sizes(), 12), hidden, second, at::IntArrayRef{16}, {1, 1}, {0, 0}, {1, 1},
                               /*transposed=*/false, {0, 0}, /*groups=*/1, {true, true, true});
  for (const auto& result : {hidden, out, to_hidden, to_second, to_bias}) hash.add(result);
}

void add_sums_and_functions(ResultHash& hash) {
  const at::Tensor x = numbers({5, 1000}, 13);
  hash.add(x.sum());
  hash.add(at::_log_softmax(x, 1, /*half_to_float=*/false));
  hash.add(std::get<0>(at::native_layer_norm(x, {1000}, {}, {}, 1e-5)));
  hash.add(at::gelu(x));
  hash.add(at::tanh(x));
  for (int64_t i = 0; i < 50; ++i) {  // these are the C library's functions
    const double value = x.const_data_ptr<float>()[i];
    hash.add(std::exp(value) + std::cos(value) + std::pow(value + 2, 0.3) + std::log(value + 2));
  }
}

void add_updates(ResultHash& hash) {
  at::Tensor plain = numbers({1001}, 14), weights = plain.clone();
  const at::Tensor gradient = numbers({1001}, 15);
  plain.add_(gradient, -0.1).mul_(0.9).addcmul_(gradient, gradient, 0.3).addcdiv_(gradient, gradient.abs().sqrt_() + 1);
  hash.add(plain);
  const at::Tensor means = gradient.mul(0.3), squares = gradient.mul(gradient), step = at::full({}, 2, at::kFloat);
  at::_fused_adam_({weights}, {gradient}, {means}, {squares}, {}, {step}, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
  hash.add(weights);
}

std::string cpu_kind() {
  const OneThread one_thread;
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t features = most_micro_kernel_features();
  ResultHash hash;
  add_products(hash);
  if (features > 0) add_micro_kernel(hash);
  add_convolutions(hash);
  add_sums_and_functions(hash);
  add_updates(hash);
  // The hash has no products by AMX, whose order of additions Intel defines.
  const std::string products = has_amx() ? "AMX" : "oneDNN up to " + std::to_string(features) + " features";
  const volatile float tiny = std::numeric_limits<float>::denorm_min();  // volatile: the compiler does not compare it
  return at::get_cpu_capability() + " " + hash.text() + (features > 0 ? ", products by " + products : "") +
         (tiny == 0 ? ", denormal numbers as 0" : "");
}

}  // namespace

std::string processor_kind(const c10::Device& device) {
  if (device.is_cuda()) return gpu_kind(device.index());
  if (!device.is_cpu()) return "";
  static const std::string kind = cpu_kind();
  return kind;
}

}  // namespace lockstep
