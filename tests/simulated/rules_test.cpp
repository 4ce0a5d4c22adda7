// Labels: simulated
// The simulated device refuses what CUDA's kernels refuse, of what lockstep calls (docs/decisions/0024).
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/error_of.hpp"

#include <array>
#include <string>
#include <vector>

namespace rules_test {

using lockstep::any_error_of;
using testing::HasSubstr;
using torch::Tensor;

struct BatchNormBackward {
  Tensor x = torch::ones({4, 3, 2, 2}, torch::kCUDA), statistics = torch::ones({3}, torch::kCUDA);

  std::string error(const Tensor& weight, const Tensor& kept, std::array<bool, 3> wanted) const {
    return any_error_of([&] {
      at::native_batch_norm_backward(x, x, weight, statistics, statistics, kept, kept, /*train=*/false, 1e-5, wanted);
    });
  }
};

TEST(Rules, SumsOverAGradientTakeKeptStatisticsAndAWeight) {
  BatchNormBackward call;
  const Tensor none, some = call.statistics;
  EXPECT_EQ(call.error(some, some, {false, true, true}), "(no error)");
  EXPECT_EQ(call.error(none, none, {true, true, true}), "(no error)");
  EXPECT_THAT(call.error(some, none, {false, true, true}), HasSubstr("save_mean should always be defined"));
  EXPECT_THAT(call.error(none, some, {false, true, true}), HasSubstr("tensor does not have a device"));
  call.x = call.x.contiguous(torch::MemoryFormat::ChannelsLast);
  EXPECT_THAT(call.error(none, some, {true, true, true}), HasSubstr("gradients of size 0"));
}

TEST(Rules, AFusedUpdateTakesGradientsThatLieAsTheirParameters) {
  const auto update = [](const Tensor& gradient) {
    std::vector<Tensor> parameters{torch::ones({2, 3}, torch::kCUDA)}, gradients{gradient};
    return any_error_of([&] { at::_fused_sgd_(parameters, gradients, {}, 0, 0, 0.1, 0, false, false, false); });
  };
  const Tensor gradient = torch::ones({3, 2}, torch::kCUDA).t();
  EXPECT_EQ(update(gradient.contiguous()), "(no error)");
  EXPECT_THAT(update(gradient), HasSubstr("check_fast_path_restrictions"));
}

TEST(Rules, AFactorisationTakesNoNumbersOf16Bits) {
  const auto factors = [](torch::ScalarType type) {
    return any_error_of([&] { at::linalg_qr(torch::ones({4, 2}, torch::dtype(type).device(torch::kCUDA))); });
  };
  EXPECT_EQ(factors(torch::kFloat), "(no error)");
  EXPECT_THAT(factors(torch::kBFloat16), HasSubstr("not implemented for BFloat16"));
}

}  // namespace rules_test
