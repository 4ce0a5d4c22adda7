// A learning rate as text: what train() says of it, and the names that options have for the parts.
#include <gmock/gmock.h>
#include <lockstep/trainer/train_options.hpp>

#include "support/error_of.hpp"
#include "trainer/option_names.hpp"

namespace lockstep {
namespace learning_rate_text_test {

TEST(LearningRateText, SaysWhatItIs) {
  LearningRate rate{.lr = 0.2};
  EXPECT_EQ(to_string(rate), "0.2");
  rate.schedule = LearningRate::Schedule::step;
  rate.step_epochs = {4, 8};
  EXPECT_EQ(to_string(rate), "0.2, times 0.1 after epochs 4, 8");
  rate = {.lr = 0.2,
          .batch = 2048,
          .scaling = LearningRate::Scaling::linear,
          .warmup_epochs = 1.5,
          .schedule = LearningRate::Schedule::cosine};
  EXPECT_EQ(to_string(rate), "0.2, linear for 2048 / 256 samples = 1.6, from 0.2 over 1.5 epochs of warm-up, cosine");
  rate = {.lr = 0.4, .batch = 64, .reference_batch = 256, .warmup_epochs = 2};
  EXPECT_EQ(to_string(rate), "0.4, from 4e-04 over 2 epochs of warm-up");
}

TEST(LearningRateText, NamesComeBack) {
  for (const auto scaling : {LearningRate::Scaling::none, LearningRate::Scaling::sqrt, LearningRate::Scaling::linear}) {
    EXPECT_EQ(value_from<LearningRate::Scaling>(to_string(scaling)), scaling);
  }
  for (const auto schedule :
       {LearningRate::Schedule::constant, LearningRate::Schedule::step, LearningRate::Schedule::cosine}) {
    EXPECT_EQ(value_from<LearningRate::Schedule>(to_string(schedule)), schedule);
  }
  EXPECT_THAT(error_of([] { value_from<LearningRate::Scaling>("square"); }), Refused());
  EXPECT_THAT(error_of([] { value_from<LearningRate::Schedule>("linear"); }), Refused());
}

}  // namespace learning_rate_text_test
}  // namespace lockstep
