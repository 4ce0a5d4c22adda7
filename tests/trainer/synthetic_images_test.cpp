// synthetic_images(): images that can be learnt, the same in each run with a seed.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <lockstep/trainer/train_options.hpp>

#include <cstdint>
#include <vector>

#include "support/error_of.hpp"

namespace lockstep {
namespace synthetic_images_test {

using testing::HasSubstr;

TEST(SyntheticImages, LookLikeTheRealOnes) {
  ImageData data = synthetic_images(3000, 500);
  EXPECT_TRUE(data.synthetic);
  EXPECT_THAT(data.source, HasSubstr("synthetic"));
  EXPECT_EQ(data.train.x.sizes(), (std::vector<int64_t>{3000, 1, 28, 28}));
  EXPECT_EQ(data.train.x.scalar_type(), at::kByte);
  EXPECT_EQ(data.train.y.scalar_type(), at::kLong);
  EXPECT_EQ(data.test.size(), 500);
  at::Tensor counts = at::bincount(data.train.y);
  EXPECT_EQ(counts.numel(), 10);
  EXPECT_GT(counts.min().item<int64_t>(), 200);
}

TEST(SyntheticImages, DependOnTheSeedAlone) {
  ImageData data = synthetic_images(300, 100, 7), again = synthetic_images(300, 100, 7);
  EXPECT_TRUE(at::equal(data.train.x, again.train.x));
  EXPECT_TRUE(at::equal(data.test.y, again.test.y));
  ImageData other = synthetic_images(300, 100, 8);
  EXPECT_FALSE(at::equal(data.train.x, other.train.x));
  ImageData larger = synthetic_images(400, 200, 7);
  EXPECT_TRUE(at::equal(data.train.x, larger.train.x.narrow(0, 0, 300)));
  EXPECT_TRUE(at::equal(data.test.x, larger.test.x.narrow(0, 0, 100)));
  EXPECT_FALSE(at::equal(data.train.x.narrow(0, 0, 100), data.test.x));
}

// The training set tells what an image shows: the nearest class mean is right far more often than by chance. But a good
// part of the images needs more than that.
TEST(SyntheticImages, CanBeLearntButAreNotTrivial) {
  ImageData data = synthetic_images(3000, 1000);
  at::Tensor x = data.train.x.flatten(1).to(at::kFloat), test_x = data.test.x.flatten(1).to(at::kFloat);
  at::Tensor means = at::zeros({10, 784});
  for (int label = 0; label < 10; ++label) means[label] = x.index({data.train.y == label}).mean(0);
  at::Tensor nearest = at::cdist(test_x, means).argmin(1);
  double accuracy = nearest.eq(data.test.y).to(at::kFloat).mean().item<double>();
  EXPECT_GT(accuracy, 0.4);
  EXPECT_LT(accuracy, 0.95);
}

TEST(SyntheticImages, RefuseAnEmptySet) {
  EXPECT_THAT(error_of([] { synthetic_images(0, 10); }), Refused());
  EXPECT_THAT(error_of([] { synthetic_images(10, -1); }), Refused());
}

}  // namespace synthetic_images_test
}  // namespace lockstep
