// load_text(): sequences of a file's bytes; and bytes that people can read.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/models/text.hpp>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

#include <set>
#include <string>

namespace lockstep {
namespace text_test {

using testing::AllOf;
using testing::HasSubstr;

// Byte i is i, up to 255 and then from 0 on.
std::string counting(int64_t bytes) {
  std::string text;
  for (int64_t i = 0; i < bytes; ++i) text += static_cast<char>(i);
  return text;
}

TEST(TextTest, EveryByteIsATargetOnceAndTheLastTenthIsHeldOut) {
  const ScratchFolder folder;
  folder.write("text", counting(205));
  const auto data = load_text(folder / "text", 4);
  EXPECT_EQ(data.train.size(), 46);  // 185 bytes: 46 sequences, and the byte behind the last
  EXPECT_EQ(data.test.size(), 4);    // 20 bytes
  EXPECT_THAT(data.source, AllOf(HasSubstr((folder / "text").string()), HasSubstr("205 bytes, the last 20 held out")));
  const auto [x, y, more] = data.train.read({0, 45, 1});
  const auto expected = torch::tensor({0, 1, 2, 3, 180, 181, 182, 183, 4, 5, 6, 7}, torch::kLong).view({3, 4});
  EXPECT_TRUE(torch::equal(x, expected)) << x;
  EXPECT_TRUE(torch::equal(y, expected + 1)) << y;
  const auto held_out = data.test.read({0, 3});
  EXPECT_TRUE(
      torch::equal(held_out.x, torch::tensor({185, 186, 187, 188, 197, 198, 199, 200}, torch::kLong).view({2, 4})));
  std::set<int64_t> targets;
  for (const auto& batch : batches(data.train, {.size = 7, .seed = 2})) {
    EXPECT_EQ(batch.x.scalar_type(), torch::kLong);
    for (int64_t i = 0; i < batch.y.numel(); ++i)
      EXPECT_TRUE(targets.insert(batch.y.flatten()[i].item<int64_t>()).second);
  }
  EXPECT_EQ(targets.size(), 184u);
}

TEST(TextTest, OtherBytesOrAnotherContextAreAnotherVersion) {
  const ScratchFolder folder;
  folder.write("a", counting(500));
  folder.write("b", counting(499) + "!");
  EXPECT_EQ(load_text(folder / "a", 4).train.version(), load_text(folder / "a", 4).train.version());
  EXPECT_NE(load_text(folder / "a", 4).train.version(), load_text(folder / "b", 4).train.version());
  EXPECT_NE(load_text(folder / "a", 4).train.version(), load_text(folder / "a", 5).train.version());
  EXPECT_NE(load_text(folder / "a", 4).train.version(), load_text(folder / "a", 4).test.version());
}

TEST(TextTest, RefusesWhatIsTooShortOrNoFile) {
  const ScratchFolder folder;
  folder.write("short", counting(40));
  folder.write("empty", "");
  EXPECT_NO_THROW(load_text(folder / "short", 3));
  EXPECT_THAT(error_of([&] { load_text(folder / "short", 4); }), Refused());
  EXPECT_THAT(error_of([&] { load_text(folder / "empty", 1); }), Refused());
  EXPECT_THAT(error_of([&] { load_text(folder / "none", 1); }), Fails(Error::file));
  EXPECT_THAT(error_of([&] { load_text(folder.path(), 1); }), Fails(Error::file));
  EXPECT_THAT(error_of([] { load_text("/dev/zero", 1); }), Fails(Error::file));  // without an end
  EXPECT_THAT(error_of([&] { load_text(folder / "short", 0); }), Refused());
}

}  // namespace text_test
}  // namespace lockstep
