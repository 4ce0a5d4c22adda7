#include "micro_kernel.hpp"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#include "base/seconds_since.hpp"
#include "cpu_cores.hpp"
#include "io/kept_choice.hpp"
#include "one_thread.hpp"

namespace lockstep {
namespace {

// Bias and ReLU cost less where a tile is in the caches. That is worth a fifth of the products' time, and beside other
// programs the measurement errs by some percent.
constexpr double kWorthOfTiles = 1.25;

// LibTorch's products copy both factors. In large ones, whose columns leave the caches, that may save nearly half of
// LibTorch's time (docs/decisions/0080).
constexpr double kWorthOfCopies = 1.8;
// The cache folder keeps one of these words. With the last, oneDNN's offsets of 32 bits are still far from their limit.
constexpr auto kNone = "0", kInCaches = "1024", kLarge = "262144";

// Tries oneDNN, which promises no order of additions: adding must round like the sum of two numbers, and the width of a
// tile must not matter.
bool adds_whole_products(int64_t rows, int64_t columns, int64_t depth) {
  const auto values = [](int64_t count, int64_t step) {
    std::vector<float> made;
    for (int64_t i = 0; i < count; ++i) made.push_back(1.0F / static_cast<float>(step * i + 2 * step + 1));
    return made;
  };
  const std::vector<float> a = values(rows * depth, 1), b = values(depth * columns, 3);
  std::vector<float> product(rows * columns), sum = values(rows * columns, 5), expected = sum;
  multiply(rows, columns, depth, a.data(), depth, b.data(), columns, product.data(), columns, /*adds=*/false);
  multiply(rows, columns, depth, a.data(), depth, b.data(), columns, sum.data(), columns, /*adds=*/true);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += product[i];
  const int64_t narrow = (columns + 1) / 2;
  std::vector<float> left(rows * narrow), expected_left;
  multiply(rows, narrow, depth, a.data(), depth, b.data(), columns, left.data(), narrow, /*adds=*/false);
  for (int64_t row = 0; row < rows; ++row) {
    const auto first = product.begin() + row * columns;
    expected_left.insert(expected_left.end(), first, first + narrow);
  }
  return sum == expected && left == expected_left;
}

// Takes the best of several turns, in seconds of this thread, so that other programs do not decide.
std::string measured_features() {
  constexpr int64_t rows = 128, size = 512, tile = 128;
  const at::Tensor a = at::full({rows, size}, 0.5, at::kFloat), b = at::full({size, size}, 0.25, at::kFloat);
  at::Tensor c = at::full({rows, size}, 0, at::kFloat);
  const auto best = [](double& seconds, const auto& product) {
    const double start = thread_seconds();
    product();
    seconds = std::min(seconds, thread_seconds() - start);
  };
  double own = std::numeric_limits<double>::infinity(), libtorch = own;
  for (int turn = 0; turn < 16; ++turn) {
    best(own, [&] {
      for (int64_t column = 0; column < size; column += tile) {
        multiply(rows, tile, size, a.const_data_ptr<float>(), size, b.const_data_ptr<float>() + column, size,
                 c.mutable_data_ptr<float>() + column, size, /*adds=*/false);
      }
    });
    best(libtorch, [&] { at::mm_out(c, a, b); });
  }
  if (own * kWorthOfCopies < libtorch) return kLarge;
  return own < kWorthOfTiles * libtorch ? kInCaches : kNone;
}

std::string kept_features() {
  std::string key = "most features|" + cpu_name() + "|" + at::get_cpu_capability() + "|" + TORCH_VERSION;
  for (const char* const name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"}) {
    const char* const value = std::getenv(name);
    key += "|" + std::string(value ? value : "");
  }
  return io::kept_choice(key, /*otherwise=*/kInCaches, measured_features);
}

int64_t find_most_features() {
  // Without oneDNN LibTorch would compute these calls by other kernels.
  if (at::get_cpu_capability() != "AVX512" || !at::globalContext().userEnabledMkldnn()) return 0;
  const OneThread one_thread;
  const c10::AutoGradMode no_grad(false);
  try {
    const bool adds = adds_whole_products(48, 48, 48) && adds_whole_products(64, 128, 128) &&
                      adds_whole_products(6, 44, 127) && adds_whole_products(1, 127, 33) &&
                      adds_whole_products(64, 512, 128) && adds_whole_products(64, 256, 256);
    return adds ? std::stoll(has_amx() ? kInCaches : kept_features()) : 0;
  } catch (const std::exception&) {  // this LibTorch, or this CPU, has none, or no number is kept
    return 0;
  }
}

}  // namespace

int64_t most_micro_kernel_features() {
  static const int64_t most = find_most_features();
  return most;
}

// LibTorch does not tell directly. oneDNN packs bfloat16 for AMX alone, and the system must give AMX's registers.
bool has_amx() {
  static const bool has =
      at::get_cpu_capability() == "AVX512" && at::native::cpublas::could_pack(at::kBFloat16) && at::cpu::init_amx();
  return has;
}

void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_of_a, const float* b,
              int64_t row_of_b, float* c, int64_t row_of_c, bool adds) {
  at::native::cpublas::brgemm(rows, columns, depth, row_of_a, row_of_b, row_of_c, adds, a, b, c, /*is_vnni=*/false);
}

}  // namespace lockstep
