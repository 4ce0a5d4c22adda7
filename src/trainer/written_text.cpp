#include "written_text.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <vector>

namespace lockstep {
namespace {

constexpr double kTemperature = 0.8;

// The first value up to which the probabilities add up to more than `random`, from 0 to 1.
int64_t drawn(const at::Tensor& logits, double random) {
  const at::Tensor sums = at::softmax(logits.to(at::kCPU, at::kDouble) / kTemperature, 0).cumsum(0);
  const double* const begin = sums.const_data_ptr<double>();
  const double* const end = begin + sums.numel();
  return std::min<int64_t>(std::upper_bound(begin, end, random) - begin, sums.numel() - 1);
}

}  // namespace

std::string written_text(const Task::Forward& forward, int64_t context, int64_t bytes, uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  std::vector<int64_t> tokens{'\n'};
  std::string text;
  for (int64_t i = 0; i < bytes; ++i) {
    const auto seen = std::min<int64_t>(context, static_cast<int64_t>(tokens.size()));
    // Zeros follow, which no earlier token sees. So every call has the same shape.
    const at::Tensor x = at::zeros({1, context}, at::kLong);
    std::copy(tokens.end() - seen, tokens.end(), x.mutable_data_ptr<int64_t>());
    const double random = at::rand({}, generator, at::kDouble).item<double>();
    tokens.push_back(drawn(forward(x)[0][seen - 1], random));
    text += static_cast<char>(tokens.back());
  }
  return text;
}

}  // namespace lockstep
