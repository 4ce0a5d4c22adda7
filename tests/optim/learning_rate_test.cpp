// The learning rate over a run, against the published formulas written out.
#include <gmock/gmock.h>
#include <lockstep/optim/learning_rate.hpp>

#include "support/error_of.hpp"

#include <cmath>
#include <string>

namespace learning_rate_test {

using lockstep::error_of;
using lockstep::learning_rate_at;
using lockstep::LearningRate;
using lockstep::Refused;

constexpr double pi = 3.14159265358979323846;

TEST(LearningRate, IsToTheBitWhatItWasGivenIfNothingIsAsked) {
  for (const double lr : {0.2, 0.1, 1.0 / 3, 0.0, 3e38}) {
    const LearningRate rate{.lr = lr, .batch = 777, .reference_batch = 256};
    for (const double done : {0.0, 0.3, 9.99}) EXPECT_EQ(learning_rate_at(rate, done), lr);
  }
}

TEST(LearningRate, GrowsWithTheBatch) {
  LearningRate rate{.lr = 0.1, .batch = 8192, .reference_batch = 256};
  EXPECT_EQ(learning_rate_at(rate, 0), 0.1);
  rate.scaling = LearningRate::Scaling::linear;
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 0), 3.2);  // Goyal et al. 2017, section 5.1: 0.1 kn / 256 for kn = 8192
  rate.scaling = LearningRate::Scaling::sqrt;
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 0), 0.1 * std::sqrt(32));
  rate.batch = 64;  // a smaller batch has a smaller rate
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 0), 0.05);
}

// Section 2.2: the rate starts at eta and grows "by a constant amount at each iteration such that it reaches eta-hat =
// k eta after 5 epochs". Then the original schedule follows.
TEST(LearningRate, WarmsUpAsGoyalEtAlDo) {
  const LearningRate rate{.lr = 0.1,
                          .batch = 8192,
                          .reference_batch = 256,
                          .scaling = LearningRate::Scaling::linear,
                          .warmup_epochs = 5,
                          .schedule = LearningRate::Schedule::step,
                          .step_epochs = {30, 60, 80},
                          .epochs = 90};
  const int steps = 157;  // steps of an epoch: ImageNet's 1.28 million images
  const double eta = 0.1, k = 32, increment = (k * eta - eta) / (5 * steps);
  double expected = eta;
  for (int step = 0; step < 5 * steps; ++step) {
    ASSERT_NEAR(learning_rate_at(rate, static_cast<double>(step) / steps), expected, 1e-12) << step;
    expected += increment;
  }
  for (const auto& [done, times] :
       {std::pair{5.0, 1.0}, {29.99, 1.0}, {30.0, 0.1}, {59.99, 0.1}, {60.0, 0.01}, {80.0, 0.001}, {90.0, 0.001}}) {
    EXPECT_NEAR(learning_rate_at(rate, done), k * eta * times, 1e-12) << done;
  }
}

// Epochs that are counted from 1 would go past the end, where the cosine would rise again.
TEST(LearningRate, IsRefusedOutsideOfTheRun) {
  const LearningRate rate{.schedule = LearningRate::Schedule::cosine, .epochs = 40};
  EXPECT_NEAR(learning_rate_at(rate, 40), 0, 1e-15);
  for (const double done : {-0.1, 40.1, std::nan("")}) {
    EXPECT_THAT(error_of([&] { learning_rate_at(rate, done); }), Refused());
  }
}

TEST(LearningRate, WarmsUpFromTheKthPartWhateverTheScaling) {
  LearningRate rate{.lr = 0.4, .batch = 1024, .reference_batch = 256, .warmup_epochs = 2};
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 1), 0.25);
  EXPECT_EQ(learning_rate_at(rate, 2), 0.4);
  rate.scaling = LearningRate::Scaling::sqrt;
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 0), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 2), 0.8);
}

TEST(LearningRate, WarmsUpFromNearZeroWhereTheBatchIsTheReference) {
  LearningRate rate{.lr = 0.4, .batch = 256, .reference_batch = 256, .warmup_epochs = 2};
  for (const int64_t batch : {256, 64}) {
    rate.batch = batch;
    EXPECT_DOUBLE_EQ(learning_rate_at(rate, 0), 0.0004);
    EXPECT_DOUBLE_EQ(learning_rate_at(rate, 1), 0.2002);
    EXPECT_EQ(learning_rate_at(rate, 2), 0.4);
  }
}

// eta_t = eta_min + (eta_max - eta_min) (1 + cos(pi T_cur / T_i)) / 2 with eta_min = 0, of one period.
TEST(LearningRate, FallsAsACosine) {
  LearningRate rate{.lr = 0.2, .schedule = LearningRate::Schedule::cosine, .epochs = 40};
  for (const double done : {0.0, 0.25, 13.0, 20.0, 39.5, 40.0}) {
    EXPECT_NEAR(learning_rate_at(rate, done), 0.2 * 0.5 * (1 + std::cos(pi * done / 40)), 1e-15) << done;
  }
  rate.warmup_epochs = 10;
  rate.batch = 512;
  for (const double done : {10.0, 17.5, 25.0, 40.0}) {
    EXPECT_NEAR(learning_rate_at(rate, done), 0.2 * 0.5 * (1 + std::cos(pi * (done - 10) / 30)), 1e-15) << done;
  }
  EXPECT_DOUBLE_EQ(learning_rate_at(rate, 5), 0.15);
}

TEST(LearningRate, RefusesWhatMakesNoSense) {
  const auto refused = [](auto change) {
    LearningRate rate{.lr = 0.1, .batch = 512, .epochs = 10};
    rate.check();
    change(rate);
    return error_of([&] { rate.check(); });
  };
  EXPECT_THAT(refused([](auto& r) { r.lr = -0.5; }), Refused());
  EXPECT_THAT(refused([](auto& r) { r.lr = std::nan(""); }), Refused());
  EXPECT_THAT(refused([](auto& r) { r.batch = 0; }), Refused());
  EXPECT_THAT(refused([](auto& r) { r.reference_batch = 0; }), Refused());
  EXPECT_THAT(refused([](auto& r) { r.epochs = 0; }), Refused());
  const auto scaled_too_far = [](auto& r) { r.lr = 3e38, r.scaling = LearningRate::Scaling::linear; };
  EXPECT_THAT(refused(scaled_too_far), Refused());
  for (const double epochs : {-1.0, std::nan("")}) {
    EXPECT_THAT(refused([&](auto& r) { r.warmup_epochs = epochs; }), Refused()) << epochs;
  }
  EXPECT_THAT(refused([](auto& r) { r.warmup_epochs = 10.5; }), Refused());
  const auto cosine_without_time = [](auto& r) { r.warmup_epochs = 10, r.schedule = LearningRate::Schedule::cosine; };
  EXPECT_THAT(refused(cosine_without_time), Refused());
  EXPECT_THAT(refused([](auto& r) { r.step_epochs = {3}; }), Refused());
  EXPECT_THAT(refused([](auto& r) { r.schedule = LearningRate::Schedule::step; }), Refused());
  for (const std::vector<int>& epochs : {std::vector{0}, {10}, {3, 3}, {5, 4}}) {
    const auto steps = [&](auto& r) { r.schedule = LearningRate::Schedule::step, r.step_epochs = epochs; };
    EXPECT_THAT(refused(steps), Refused()) << testing::PrintToString(epochs);
  }
  const auto flat = [](auto& r) { r.schedule = LearningRate::Schedule::step, r.step_epochs = {1}, r.step_factor = 0; };
  EXPECT_THAT(refused(flat), Refused());
}

}  // namespace learning_rate_test
