// conv_relu_pool beside LibTorch's operators, on one thread: LeNet's layers, other shapes, and the GEMMs that an im2col
// would end in. Best of several, in milliseconds. docs/decisions/0007-lenet-kernels.md holds a run's figures.
//
//   ninja -C build/release bench_conv_relu_pool && build/release/bench_conv_relu_pool
#include <torch/torch.h>
#include <lockstep/models/conv_relu_pool.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Layer = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&);

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return torch::conv2d(x, weight, bias);
}

at::Tensor three_operators(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return torch::avg_pool2d(torch::relu(torch::conv2d(x, weight, bias)), 2);
}

template <class Work>
double milliseconds(Work work) {
  work();
  double best = 1e9, total = 0;
  for (int i = 0; i < 200 && (i < 4 || total < 200); ++i) {
    const auto start = Clock::now();
    work();
    const double taken = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    best = std::min(best, taken);
    total += taken;
  }
  return best;
}

struct Shape {
  int64_t samples, channels, size, out_channels, kernel;
  bool x_needs_gradient = true;
};

struct Times {
  double forward, backward;
};

Times times(Layer layer, const Shape& s, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  at::Tensor x = torch::randn({s.samples, s.channels, s.size, s.size}).contiguous(format);
  at::Tensor weight = torch::randn({s.out_channels, s.channels, s.kernel, s.kernel}).mul_(0.05).contiguous(format);
  at::Tensor bias = torch::randn({s.out_channels});
  Times result{};
  result.forward = milliseconds([&] { layer(x, weight, bias); });
  std::vector<at::Tensor> inputs{weight, bias};
  if (s.x_needs_gradient) inputs.push_back(x);
  for (auto& input : inputs) input.requires_grad_();
  const at::Tensor out = layer(x, weight, bias), grad = torch::randn(out.sizes()).contiguous(format);
  result.backward = milliseconds([&] { torch::autograd::grad({out}, inputs, {grad}, /*retain_graph=*/true); });
  return result;
}

void compare_lenet_layers() {
  std::printf("LeNet's layers, 128 samples                  forward  backward\n");
  const auto report = [](const char* name, const Times& t) {
    std::printf("  %-42s %7.2f   %7.2f\n", name, t.forward, t.backward);
  };
  const auto channels_last = at::MemoryFormat::ChannelsLast;
  for (const bool first : {true, false}) {
    const Shape layer = first ? Shape{128, 1, 28, 20, 3, /*x_needs_gradient=*/false} : Shape{128, 20, 13, 50, 5, true};
    std::printf(" %s\n", first ? "first" : "second");
    report("conv2d", times(convolution, layer));
    report("conv2d, channels last", times(convolution, layer, channels_last));
    report("conv2d, relu, avg_pool2d", times(three_operators, layer));
    report("conv2d, relu, avg_pool2d, channels last", times(three_operators, layer, channels_last));
    report("conv_relu_pool", times(lockstep::conv_relu_pool, layer));
  }
}

void compare_other_shapes() {
  std::printf("forward and backward                 conv_relu_pool  three operators\n");
  const std::vector<Shape> shapes = {
      {1, 1, 28, 20, 3},     {1, 20, 13, 50, 5},    {2, 20, 13, 50, 5},    {4, 20, 13, 50, 5},  {8, 20, 13, 50, 5},
      {17, 20, 13, 50, 5},   {32, 3, 32, 32, 3},    {32, 3, 64, 32, 3},    {32, 32, 32, 64, 3}, {32, 64, 18, 128, 3},
      {32, 128, 18, 128, 3}, {32, 256, 10, 256, 3}, {32, 512, 10, 512, 3}, {16, 3, 224, 64, 7}};
  for (const Shape& s : shapes) {
    const Times ours = times(lockstep::conv_relu_pool, s), theirs = times(three_operators, s);
    std::printf("  %3ld x %3ldx%3ldx%3ld -> %3ld, kernel %ld  %6.2f %8.2f   %7.2f %8.2f\n", s.samples, s.channels,
                s.size, s.size, s.out_channels, s.kernel, ours.forward, ours.backward, theirs.forward, theirs.backward);
  }
}

// An im2col of 4 samples for the second layer, whose windows stay in the second-level cache.
void measure_gemms() {
  std::printf("mm, GFLOP/s\n");
  for (const auto& [m, k, n] :
       std::vector<std::array<int64_t, 3>>{{256, 500, 50}, {256, 50, 500}, {50, 256, 500}, {512, 512, 512}}) {
    const at::Tensor a = torch::randn({m, k}), b = torch::randn({k, n});
    at::Tensor out = torch::empty({m, n});
    const double taken = milliseconds([&] { torch::mm_out(out, a, b); });
    std::printf("  [%ld, %ld] x [%ld, %ld]: %.0f\n", m, k, k, n, 2e-6 * static_cast<double>(m * k * n) / taken);
  }
}

}  // namespace

int main() {
  torch::manual_seed(0);
  torch::set_num_threads(1);
  compare_lenet_layers();
  compare_other_shapes();
  measure_gemms();
}
