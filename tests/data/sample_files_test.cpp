// Sample files: data larger than memory give every sample once per epoch, in an order of seed and epoch alone; and what
// is wrong with files is said.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data/sample_files.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep {
namespace sample_files_test {

using testing::ElementsAre;

namespace fs = std::filesystem;

// Samples `first` to below `first + count`, each of which tells its number in all tensors.
Dataset::Tensors samples_from(int64_t first, int64_t count) {
  const at::Tensor y = at::arange(first, first + count);
  return {{"x", at::stack({y, -y}, 1).to(at::kDouble)}, {"y", y}, {"even", (y % 2 == 0).unsqueeze(1)}};
}

class SampleFiles : public testing::Test {
 protected:
  SampleFiles() {
    int64_t first = 0;
    for (const int64_t count : {7, 0, 10, 3, 10}) {
      save_tensors(folder_ / ("part-" + std::to_string(files_.size()) + ".safetensors"), samples_from(first, count));
      files_ = sample_files(folder_.path());
      first += count;
    }
  }

  std::vector<int64_t> order_of(const Samples& samples, const BatchOptions& options,
                                const Batches::Partner& partner = {}) const {
    std::vector<int64_t> order;
    for (const Batch& batch : batches(samples, options, partner)) {
      EXPECT_TRUE(at::equal(batch.x.select(1, 0).to(at::kLong), batch.y));
      EXPECT_TRUE(at::equal(batch.x.select(1, 1), -batch.x.select(1, 0)));
      EXPECT_TRUE(at::equal(batch["even"].squeeze(1), batch.y % 2 == 0));
      order.insert(order.end(), batch.y.const_data_ptr<int64_t>(), batch.y.const_data_ptr<int64_t>() + batch.size());
    }
    return order;
  }
  Caught refused(const std::vector<fs::path>& files, const Samples::FileOptions& options = {}) const {
    return error_of([&] { samples_of(files, options); });
  }

  const ScratchFolder folder_;
  std::vector<fs::path> files_;
};

TEST_F(SampleFiles, GiveEverySampleOncePerEpochInAnOrderOfSeedAndEpoch) {
  const Samples samples = samples_of(files_, {.shuffle_buffer = 6});
  EXPECT_EQ(samples.size(), 30);
  std::vector<int64_t> all(30);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(order_of(samples, {.size = 8, .shuffle = false}), all);
  const auto order = order_of(samples, {.size = 8, .seed = 1, .epoch = 1});
  EXPECT_THAT(order, testing::UnorderedElementsAreArray(all));
  EXPECT_EQ(order,
            order_of(samples_of(files_, {.shuffle_buffer = 6, .read_ahead = 0}), {.size = 8, .seed = 1, .epoch = 1}));
  EXPECT_NE(order, order_of(samples, {.size = 8, .seed = 1, .epoch = 2}));
  EXPECT_NE(order, order_of(samples, {.size = 8, .seed = 2, .epoch = 1}));
  // From the middle, and on three ranks.
  EXPECT_EQ(order_of(samples, {.size = 8, .seed = 1, .epoch = 1, .start = 2}),
            std::vector<int64_t>(order.begin() + 16, order.end()));
  std::vector<std::vector<int64_t>> parts;
  for (int index = 0; index < 3; ++index)
    parts.push_back(order_of(samples, {.size = 9, .seed = 1, .epoch = 1}, {.index = index, .count = 3}));
  for (size_t batch = 0; batch < 3; ++batch) {
    for (size_t rank = 0; rank < 3; ++rank) {
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(parts[rank][3 * batch + i], order[9 * batch + 3 * rank + i]);
    }
  }
}

// A sample that comes at place p of the epoch was among the first p + buffer that the files gave.
TEST_F(SampleFiles, AreMixedThroughABufferThatIsBounded) {
  const auto unmixed = order_of(samples_of(files_, {.shuffle_buffer = 1}), {.size = 8, .seed = 3, .epoch = 5});
  const auto mixed = order_of(samples_of(files_, {.shuffle_buffer = 6}), {.size = 8, .seed = 3, .epoch = 5});
  EXPECT_NE(mixed, unmixed);
  int early = 0;
  for (size_t place = 0; place < mixed.size(); ++place) {
    const auto read = std::find(unmixed.begin(), unmixed.end(), mixed[place]) - unmixed.begin();
    EXPECT_LT(read, static_cast<std::ptrdiff_t>(place) + 6);
    early += read > static_cast<std::ptrdiff_t>(place) ? 1 : 0;
  }
  EXPECT_GT(early, 5);
  // Files follow each other whole, in an order that changes with the epoch.
  const auto first_of = [&](int64_t epoch) {
    return order_of(samples_of(files_, {.shuffle_buffer = 1}), {.size = 30, .epoch = epoch})[0];
  };
  std::vector<int64_t> firsts;
  for (int64_t epoch = 0; epoch < 20; ++epoch) firsts.push_back(first_of(epoch));
  std::sort(firsts.begin(), firsts.end());
  firsts.erase(std::unique(firsts.begin(), firsts.end()), firsts.end());
  EXPECT_THAT(firsts, ElementsAre(0, 7, 17, 20));
}

TEST_F(SampleFiles, TakeOtherNamesAndTransforms) {
  save_tensors(folder_ / "other", {{"image", at::full({3, 2}, 51, at::kByte)}, {"label", at::arange(3)}});
  const Samples samples = samples_of({folder_ / "other"}, {.x = "image", .y = "label", .transform = [](Dataset rows) {
                                                             rows.x = rows.x.to(at::kDouble) / 255;
                                                             return rows;
                                                           }});
  const Batch batch = *batches(samples, {.size = 3, .shuffle = false}).begin();
  EXPECT_TRUE(at::equal(batch.x, at::full({3, 2}, 0.2, at::kDouble)));
  EXPECT_TRUE(at::equal(batch.y, at::arange(3)));
}

TEST_F(SampleFiles, AreToldApartByTheirVersion) {
  const auto version = [](const std::vector<fs::path>& files) { return samples_of(files).version(); };
  const std::string before = version(files_);
  EXPECT_EQ(version(files_), before);
  EXPECT_NE(version({files_.begin(), files_.end() - 1}), before);
  save_tensors(files_[2], samples_from(8, 10));  // the length is the old one's; the header has another SHA-256
  EXPECT_NE(version(files_), before);
}

TEST_F(SampleFiles, AreRefusedIfTheyDoNotFitTogether) {
  EXPECT_THAT(refused({}), Refused());
  EXPECT_THAT(refused({files_[1]}), Fails(Error::file));
  EXPECT_THAT(refused(files_, {.shuffle_buffer = 0}), Refused());
  EXPECT_THAT(refused(files_, {.x = "image"}), Fails(Error::file));
  const fs::path other = folder_ / "other.safetensors";
  const auto refused_with = [&](const Dataset::Tensors& tensors) {
    save_tensors(other, tensors);
    return refused({files_[0], other});
  };
  Dataset::Tensors tensors = samples_from(0, 4);
  tensors["x"] = tensors["x"].to(at::kFloat);
  EXPECT_THAT(refused_with(tensors), Fails(Error::file));
  tensors = samples_from(0, 4);
  tensors.erase("even");
  EXPECT_THAT(refused_with(tensors), Fails(Error::file));
  tensors = samples_from(0, 4);
  tensors["odd"] = tensors["even"];
  EXPECT_THAT(refused_with(tensors), Fails(Error::file));
  tensors = samples_from(0, 4);
  tensors["y"] = at::arange(5);
  EXPECT_THAT(refused_with(tensors), Fails(Error::file));
  folder_.write("other.safetensors", "not a file of tensors");
  EXPECT_THAT(refused({other}), Fails(Error::file));
  EXPECT_THAT(error_of([&] { sample_files(folder_ / "nowhere"); }), Fails(Error::file));
  fs::create_directory(folder_ / "empty");
  EXPECT_THAT(error_of([&] { sample_files(folder_ / "empty"); }), Fails(Error::file));
}

TEST_F(SampleFiles, ThatChangeWhileTheyAreReadAreNoticed) {
  for (const int ahead : {0, 2}) {
    const Samples samples = samples_of(files_, {.read_ahead = ahead});
    const auto size = fs::file_size(files_[4]);
    const std::string bytes = folder_.read(files_[4]);
    fs::resize_file(files_[4], size - 8);
    EXPECT_THAT(error_of([&] { order_of(samples, {.size = 8, .shuffle = false}); }), Fails(Error::file));
    fs::remove(files_[4]);
    EXPECT_THAT(error_of([&] { order_of(samples, {.size = 8, .shuffle = false}); }), Fails(Error::file));
    folder_.write(files_[4].filename(), bytes);
  }
}

}  // namespace sample_files_test
}  // namespace lockstep
