#include "model_parts.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/number_text.hpp"

namespace lockstep {
namespace {

// Above these limits products of sizes would come near the largest integer, and parameters would fit no memory.
constexpr double largest_width = 64;
constexpr int64_t largest_image = 4096;

}  // namespace

void check_width(const std::string& model, double width) {
  if (width > 0 && width <= largest_width) return;  // false for NaN
  throw Error(model + ": the width is " + number_text(width) + "; it must be above 0 and at most " +
              number_text(largest_width));
}

void check_image_size(const std::string& model, int64_t size, int64_t least) {
  if (size >= least && size <= largest_image) return;
  throw Error(model + ": the image size is " + std::to_string(size) + "; it must be from " + std::to_string(least) +
              " to " + std::to_string(largest_image) + ", or else the layers have no pixels left, or too many");
}

void check_at_least_one(const std::string& model, const std::string& what, int64_t size) {
  if (size < 1) throw Error(model + ": " + what + " is " + std::to_string(size) + "; it must be at least 1");
}

void check_dropout(const std::string& model, const std::string& what, double dropout) {
  if (dropout >= 0 && dropout < 1) return;  // false for NaN
  throw Error(model + ": " + what + " is " + number_text(dropout) + "; it must be at least 0 and below 1");
}

int64_t scaled(int64_t count, double width) {
  return std::max<int64_t>(1, std::llround(static_cast<double>(count) * width / 8)) * 8;
}

torch::nn::Upsample resize(int64_t size) {
  return torch::nn::Upsample(
      torch::nn::UpsampleOptions().size(std::vector<int64_t>{size, size}).mode(torch::kBilinear).align_corners(false));
}

void draw_weights(torch::nn::Module& net, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (auto& item : net.named_parameters()) {
    torch::Tensor& parameter = item.value();
    if (parameter.dim() > 1) {  // [out, in, ...]
      const int64_t receptive_field = parameter[0][0].numel();
      const auto fans = static_cast<double>((parameter.size(0) + parameter.size(1)) * receptive_field);
      const double bound = std::sqrt(6 / fans);
      parameter.uniform_(-bound, bound, generator);
    } else if (item.key().ends_with("bias")) {
      parameter.zero_();
    }
  }
}

}  // namespace lockstep
