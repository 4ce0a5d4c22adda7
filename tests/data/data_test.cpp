#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>
#include <lockstep/data/data.hpp>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "data/data_digests.hpp"
#include "io/fashion_mnist_files.hpp"
#include "support/error_of.hpp"
#include "support/idx_files.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep {
namespace data_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// A small Fashion-MNIST: three images to train, two to test; tests replace single files of it.
class FashionMnistTest : public testing::Test {
 protected:
  static std::string images(uint32_t count, uint32_t height = 28, uint32_t width = 28) {
    std::string values;
    for (uint32_t i = 0; i < count; ++i) values += std::string(size_t{height} * width, static_cast<char>(50 * i + 5));
    return idx_bytes({count, height, width}, values);
  }
  static std::string labels(const std::string& values) {
    return idx_bytes({static_cast<uint32_t>(values.size())}, values);
  }
  void SetUp() override {
    folder_.write("train-images-idx3-ubyte.gz", gzipped(images(3)));
    folder_.write("train-labels-idx1-ubyte.gz", gzipped(labels({9, 0, 4})));
    folder_.write("t10k-images-idx3-ubyte", images(2));
    folder_.write("t10k-labels-idx1-ubyte", labels({1, 2}));
  }
  std::string error() {
    return error_of([&] { load_fashion_mnist(folder_.path()); });
  }
  ScratchFolder folder_;
};

TEST_F(FashionMnistTest, LoadsPlainAndGzippedFiles) {
  ImageData data = load_fashion_mnist(folder_.path());
  EXPECT_EQ(data.source, folder_.path().string());
  EXPECT_FALSE(data.synthetic);
  EXPECT_EQ(data.train.x.sizes(), (std::vector<int64_t>{3, 1, 28, 28}));
  EXPECT_EQ(data.train.x.scalar_type(), at::kByte);
  EXPECT_TRUE(data.train.x.is_contiguous());
  EXPECT_TRUE(at::equal(data.train.x.select(3, 27).select(2, 27).flatten(), at::tensor({5, 55, 105}, at::kByte)));
  EXPECT_TRUE(at::equal(data.train.y, at::tensor({9, 0, 4}, at::kLong)));
  EXPECT_EQ(data.test.size(), 2);
  EXPECT_TRUE(at::equal(data.test.y, at::tensor({1, 2}, at::kLong)));
}

TEST_F(FashionMnistTest, NamesEveryMissingFile) {
  std::filesystem::remove(folder_ / "t10k-labels-idx1-ubyte");
  std::filesystem::remove(folder_ / "train-images-idx3-ubyte.gz");
  EXPECT_THAT(error(), AllOf(HasSubstr(folder_.path().string()), HasSubstr("train-images-idx3-ubyte"),
                             HasSubstr("t10k-labels-idx1-ubyte"), Not(HasSubstr("train-labels"))));
  EXPECT_THAT(error_of([&] { load_fashion_mnist(folder_ / "nowhere"); }),
              AllOf(HasSubstr("nowhere"), HasSubstr("no such folder")));
}

// Root reads everything; so for one scope root is nobody.
class NotRoot {
 public:
  NotRoot() : before_(geteuid()) {
    if (before_ == 0) EXPECT_EQ(seteuid(65534), 0);
  }
  ~NotRoot() { EXPECT_EQ(seteuid(before_), 0); }

 private:
  uid_t before_;
};

TEST_F(FashionMnistTest, SaysWhyAFolderCannotBeSeen) {
  EXPECT_THAT(error_of([&] { load_fashion_mnist(folder_ / "t10k-images-idx3-ubyte"); }), HasSubstr("not a folder"));
  std::filesystem::create_directory(folder_ / "within");
  std::filesystem::permissions(folder_.path(), std::filesystem::perms::none);
  {
    const NotRoot nobody;
    EXPECT_THAT(error(), AllOf(HasSubstr("Permission denied"), Not(HasSubstr("lacks"))));
    EXPECT_THAT(error_of([&] { load_fashion_mnist(folder_ / "within"); }), HasSubstr("Permission denied"));
  }
  std::filesystem::permissions(folder_.path(), std::filesystem::perms::owner_all);
}

TEST(DatasetTest, OnItsOwnDeviceIsNoCopy) {
  const ImageData data = synthetic_images(10, 5);
  const Dataset there = data.train.to(c10::Device(at::kCPU));
  EXPECT_EQ(there.x.const_data_ptr(), data.train.x.const_data_ptr());
  EXPECT_EQ(there.y.const_data_ptr(), data.train.y.const_data_ptr());
  EXPECT_EQ(there.x.scalar_type(), at::kByte);
}

TEST_F(FashionMnistTest, RefusesCountsThatDiffer) {
  folder_.write("train-labels-idx1-ubyte.gz", gzipped(labels({9, 0})));
  EXPECT_THAT(error(), AllOf(HasSubstr("3 images"), HasSubstr("2 labels"), HasSubstr("train-labels-idx1-ubyte.gz")));
}

TEST_F(FashionMnistTest, RefusesALabelAboveNine) {
  folder_.write("t10k-labels-idx1-ubyte", labels({9, 10}));
  EXPECT_THAT(error(), AllOf(HasSubstr("t10k-labels-idx1-ubyte"), HasSubstr("label 10 at position 1")));
  folder_.write("t10k-labels-idx1-ubyte", labels({static_cast<char>(255), 0}));
  EXPECT_THAT(error(), HasSubstr("label 255 at position 0"));
}

TEST_F(FashionMnistTest, RefusesImagesOfAnotherSize) {
  folder_.write("t10k-images-idx3-ubyte", images(2, 32, 28));
  EXPECT_THAT(error(), AllOf(HasSubstr("t10k-images-idx3-ubyte"), HasSubstr("32 x 28"), HasSubstr("28 x 28")));
  folder_.write("t10k-images-idx3-ubyte", images(2, 28, 27));
  EXPECT_THAT(error(), HasSubstr("28 x 27"));
}

TEST_F(FashionMnistTest, RefusesAnEmptySet) {
  folder_.write("t10k-images-idx3-ubyte", images(0));
  folder_.write("t10k-labels-idx1-ubyte", labels(""));
  EXPECT_THAT(error(), HasSubstr("holds no images"));
}

TEST_F(FashionMnistTest, RefusesDamagedFiles) {
  folder_.write("train-images-idx3-ubyte.gz", gzipped(images(3)).substr(0, 30));
  EXPECT_THAT(error(), AllOf(HasSubstr("train-images-idx3-ubyte.gz"), HasSubstr("cut off")));
}

// Sets an environment variable for one scope.
class Environment {
 public:
  Environment(const char* name, std::optional<std::string> value) : name_(name) {
    if (const char* old = getenv(name)) old_ = old;
    set(value);
  }
  ~Environment() { set(old_); }

 private:
  void set(const std::optional<std::string>& value) {
    if (value) setenv(name_, value->c_str(), 1);
    if (!value) unsetenv(name_);
  }
  const char* name_;
  std::optional<std::string> old_;
};

TEST_F(FashionMnistTest, KnowsWherePackagesPutIt) {
  constexpr const char* debian = "/usr/share/datasets/fashion-mnist";
  Environment home("HOME", "/home/somebody");
  {
    Environment data("XDG_DATA_HOME", "/data");
    EXPECT_THAT(fashion_mnist_places(), ElementsAre(debian, "/data/lockstep/fashion-mnist"));
  }
  {
    Environment data("XDG_DATA_HOME", "relative");
    EXPECT_THAT(fashion_mnist_places(), ElementsAre(debian, "/home/somebody/.local/share/lockstep/fashion-mnist"));
  }
  Environment data("XDG_DATA_HOME", std::nullopt);
  EXPECT_EQ(fashion_mnist_download_place(), "/home/somebody/.local/share/lockstep/fashion-mnist");
  Environment no_home("HOME", std::nullopt);
  EXPECT_EQ(fashion_mnist_download_place(), "");
  EXPECT_THAT(fashion_mnist_places(), ElementsAre(debian));
}

TEST_F(FashionMnistTest, IsFoundInTheFirstCompletePlace) {
  ScratchFolder incomplete;
  incomplete.write("train-images-idx3-ubyte.gz", "");
  EXPECT_EQ(io::find_fashion_mnist({"/nowhere", incomplete.path(), folder_.path(), "/nowhere"}), folder_.path());
  EXPECT_THAT(
      error_of([&] {
        io::find_fashion_mnist({"/nowhere", incomplete.path()});
      }),
      AllOf(HasSubstr("/nowhere: no such folder"), HasSubstr(incomplete.path().string() + ": it lacks train-labels"),
            HasSubstr("dataset-fashion-mnist"), HasSubstr("`data_dir`"), HasSubstr("fetch-data"),
            HasSubstr("`data` synthetic")));
}

TEST(FashionMnist, IsTheRealThing) {
  if (!std::filesystem::exists(fashion_mnist_places()[0])) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  ImageData data = load_fashion_mnist();
  EXPECT_EQ(data.source, fashion_mnist_places()[0].string());
  EXPECT_EQ(data.train.x.sizes(), (std::vector<int64_t>{60000, 1, 28, 28}));
  EXPECT_EQ(data.test.x.sizes(), (std::vector<int64_t>{10000, 1, 28, 28}));
  EXPECT_TRUE(at::equal(at::bincount(data.train.y), at::full({10}, 6000, at::kLong)));
  EXPECT_TRUE(at::equal(at::bincount(data.test.y), at::full({10}, 1000, at::kLong)));
  EXPECT_NEAR(data.train.x.to(at::kFloat).mean().item<double>() / 255, 0.2860, 1e-4);  // as everybody reports it
  DataDigests digests = digests_of(data);
  EXPECT_TRUE(is_fashion_mnist(digests));
  EXPECT_FALSE(has_images_of_mnist(digests));
  digests.test_labels = digests.train_labels;
  EXPECT_FALSE(is_fashion_mnist(digests));
}

// These are what sha256sum says of MNIST's four files, unpacked, in many public places.
TEST(Mnist, IsToldByTheDigestsOfItsImages) {
  const DataDigests mnist{.train_images = "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                          .train_labels = "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                          .test_images = "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                          .test_labels = "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"};
  EXPECT_TRUE(has_images_of_mnist(mnist));
  EXPECT_FALSE(is_fashion_mnist(mnist));
  EXPECT_TRUE(has_images_of_mnist({.train_images = mnist.train_images}));  // beside other files
  EXPECT_TRUE(has_images_of_mnist({.test_images = mnist.test_images}));
  EXPECT_FALSE(has_images_of_mnist({.train_images = mnist.test_images, .train_labels = mnist.train_labels}));
}

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
  EXPECT_THAT(error_of([] { synthetic_images(0, 10); }), HasSubstr("0 to train"));
  EXPECT_THAT(error_of([] { synthetic_images(10, -1); }), HasSubstr("-1 to test"));
}

// Sample i is [i, -i], its target i + 1000.
Dataset numbered(int64_t n) {
  at::Tensor numbers = at::arange(n, at::kLong);
  return {at::stack({numbers, -numbers}, 1), numbers + 1000};
}

// The numbers of the samples that one shard gets, batch by batch.
std::vector<std::vector<int64_t>> numbers_of(const Dataset& dataset, const BatchOptions& options,
                                             const Partner& shard) {
  std::vector<std::vector<int64_t>> result;
  for (const Batch& batch : batches(dataset, options, shard)) {
    at::Tensor numbers = batch.y - 1000;
    EXPECT_TRUE(at::equal(batch.x, at::stack({numbers, -numbers}, 1)));
    EXPECT_EQ(batch.size(), numbers.numel());
    result.emplace_back(numbers.data_ptr<int64_t>(), numbers.data_ptr<int64_t>() + numbers.numel());
  }
  return result;
}

TEST(Batches, OfAllShardsTogetherAreTheWholePermutationOnce) {
  std::mt19937 random(1);
  bool had_empty_part = false;
  for (int trial = 0; trial < 200; ++trial) {
    Dataset dataset = numbered(random() % 60);
    BatchOptions options{.size = 1 + trial % 20, .seed = random(), .epoch = trial % 5, .shuffle = trial % 4 != 0};
    auto whole = numbers_of(dataset, options, {});
    int count = 1 + static_cast<int>(random() % 5);
    SCOPED_TRACE(testing::Message() << dataset.size() << " samples, batches of " << options.size << ", " << count
                                    << " shards");

    std::vector<std::vector<int64_t>> joined(whole.size());
    for (int index = 0; index < count; ++index) {
      auto parts = numbers_of(dataset, options, {.index = index, .count = count});
      ASSERT_EQ(parts.size(), whole.size());
      for (size_t batch = 0; batch < parts.size(); ++batch) {
        size_t least = whole[batch].size() / count;
        EXPECT_GE(parts[batch].size(), least);
        EXPECT_LE(parts[batch].size(), least + 1);
        had_empty_part |= parts[batch].empty();
        joined[batch].insert(joined[batch].end(), parts[batch].begin(), parts[batch].end());
      }
    }
    EXPECT_EQ(joined, whole);  // the same batches in the same order, whatever the number of shards

    std::vector<int64_t> seen;
    for (size_t batch = 0; batch < whole.size(); ++batch) {
      bool last = batch + 1 == whole.size();
      if (!last) EXPECT_EQ(whole[batch].size(), static_cast<size_t>(options.size));
      if (last) EXPECT_GE(whole[batch].size(), 1u);
      seen.insert(seen.end(), whole[batch].begin(), whole[batch].end());
    }
    if (options.shuffle) std::sort(seen.begin(), seen.end());
    std::vector<int64_t> all(dataset.size());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
  }
  EXPECT_TRUE(had_empty_part);
}

TEST(Batches, HaveAnOrderThatSeedAndEpochAloneDecide) {
  Dataset dataset = numbered(100);
  auto order = [&](uint64_t seed, int64_t epoch, int64_t size = 100) {
    std::vector<int64_t> result;
    for (const auto& batch : numbers_of(dataset, {.size = size, .seed = seed, .epoch = epoch}, {})) {
      result.insert(result.end(), batch.begin(), batch.end());
    }
    return result;
  };
  auto first = order(3, 5);
  at::manual_seed(99);
  at::rand({10});
  EXPECT_EQ(order(3, 5), first);
  EXPECT_EQ(order(3, 5, 7), first);

  // Every pair gives an order of its own, pairs with the same sum or with equal low bits too.
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{1} << 32, uint64_t{1} << 63}) {
    for (int64_t epoch = 0; epoch < 10; ++epoch) orders.insert(order(seed, epoch));
  }
  EXPECT_EQ(orders.size(), 60u);
}

TEST(Batches, LeaveTheGlobalGeneratorAlone) {
  at::manual_seed(5);
  at::Tensor expected = at::rand({4});
  at::manual_seed(5);
  batches(numbered(50), {});
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

TEST(Batches, ShuffleWell) {
  auto order = numbers_of(numbered(1000), {.size = 1000}, {}).at(0);
  int fixed = 0, neighbours = 0;
  for (size_t i = 0; i < order.size(); ++i) fixed += order[i] == static_cast<int64_t>(i);
  for (size_t i = 1; i < order.size(); ++i) neighbours += order[i] == order[i - 1] + 1;
  EXPECT_LT(fixed, 10);
  EXPECT_LT(neighbours, 10);
}

TEST(Batches, WithoutShufflingKeepTheOrder) {
  EXPECT_THAT(numbers_of(numbered(7), {.size = 3, .shuffle = false}, {.index = 0, .count = 2}),
              ElementsAre(ElementsAre(0, 1), ElementsAre(3, 4), ElementsAre(6)));
  EXPECT_THAT(numbers_of(numbered(7), {.size = 3, .shuffle = false}, {.index = 1, .count = 2}),
              ElementsAre(ElementsAre(2), ElementsAre(5), ElementsAre()));
}

TEST(Batches, MakeFloatsOfImages) {
  Dataset dataset{at::tensor({0, 51, 255}, at::kByte).view({3, 1, 1, 1}), at::zeros({3}, at::kLong)};
  for (const Batch& batch : batches(dataset, {.shuffle = false})) {
    EXPECT_EQ(batch.x.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(batch.x.flatten(), at::tensor({0.0f, 0.2f, 1.0f})));
    EXPECT_EQ(batch.global_size, 3);
  }
  EXPECT_TRUE(at::equal(dataset.x.flatten(), at::tensor({0, 51, 255}, at::kByte)));
}

TEST(Batches, LeaveOtherTypesAsTheyAre) {
  for (auto type : {at::kDouble, at::kFloat, at::kHalf, at::kLong}) {
    Dataset dataset{at::ones({4, 2}, type), at::ones({4}, at::kFloat)};
    EXPECT_EQ(batches(dataset, {}).begin()->x.scalar_type(), type);
  }
}

TEST(Batches, GiveAnEmptyPartItsShapeAndType) {
  Dataset dataset{at::zeros({2, 1, 28, 28}, at::kByte), at::zeros({2}, at::kLong)};
  for (bool shuffle : {true, false}) {
    Batches part = batches(dataset, {.shuffle = shuffle}, {.index = 2, .count = 3});
    const Batch batch = *part.begin();
    EXPECT_EQ(batch.x.sizes(), (std::vector<int64_t>{0, 1, 28, 28}));
    EXPECT_EQ(batch.x.scalar_type(), at::kFloat);
    EXPECT_EQ(batch.y.sizes(), (std::vector<int64_t>{0}));
    EXPECT_EQ(batch.size(), 0);
    EXPECT_EQ(batch.global_size, 2);
  }
}

// Which would train all the same, divided by 255.
TEST(Batches, RefuseTablesAndTokensOfBytes) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{6}, {6, 4}}) {
    const Dataset bytes{at::ones(shape, at::kByte), at::zeros({6}, at::kLong)};
    EXPECT_THAT(error_of([&] { batches(bytes, {.size = 2}); }),
                AllOf(HasSubstr("x is uint8"), HasSubstr("x.to(at::kFloat)"), HasSubstr("x.to(at::kLong)")));
  }
  const Dataset images{at::ones({6, 4, 4}, at::kByte), at::zeros({6}, at::kLong)};
  EXPECT_EQ(batches(images, {.size = 2}).count(), 3);
}

// Of three grains, on four shards.
TEST(Batches, GiveAnEmptyPartASampleAsAnExample) {
  Dataset dataset = numbered(6);
  dataset.x = dataset.x.to(at::kByte).unsqueeze(2);
  dataset.more["mask"] = dataset.x;
  const Samples read(6, [&](const std::vector<int64_t>& numbers) {
    const at::Tensor rows = at::tensor(numbers);
    return Dataset{dataset.x.index_select(0, rows), dataset.y.index_select(0, rows)};
  });
  for (const bool shuffle : {true, false}) {
    for (int index = 0; index < 4; ++index) {
      const BatchOptions options{.size = 6, .shuffle = shuffle, .grain = 2};
      const Partner shard{.index = index, .count = 4};
      const Batch batch = *batches(dataset, options, shard).begin(), other = *batches(read, options, shard).begin();
      EXPECT_EQ(batch.like.x.defined(), index == 3);
      EXPECT_EQ(other.like.x.defined(), index == 3);
      if (index < 3) continue;
      const int64_t number = batch.like.y.item<int64_t>() - 1000;
      EXPECT_TRUE(at::equal(batch.like.x, dataset.x.narrow(0, number, 1).to(at::kFloat).div(255)));
      EXPECT_TRUE(at::equal(batch.like.more.at("mask"), dataset.x.narrow(0, number, 1)));
      EXPECT_TRUE(at::equal(other.like.x, dataset.x.narrow(0, other.like.y.item<int64_t>() - 1000, 1)));
      EXPECT_FALSE(batches(dataset, {.size = 6}, {.index = 7, .count = 8}).begin()->like.x.defined());
    }
  }
}

// Of 5 grains shards have 2, 2 and 1, the last of 2 samples.
TEST(Batches, WithAGrainAreCutIntoAsManyPartsOnAllShards) {
  const Dataset dataset = numbered(18);
  const auto parts_of = [&](int index, int64_t count) {
    const Batch batch =
        *batches(dataset, {.size = 18, .shuffle = false, .grain = 4}, {.index = index, .count = 3}).begin();
    return batch.in_parts(count);
  };
  for (int index = 0; index < 3; ++index) {
    const auto one = parts_of(index, 1), two = parts_of(index, 2);
    ASSERT_EQ(one.size(), 1u);
    EXPECT_EQ(one[0].turns, 2);
    ASSERT_EQ(two.size(), 2u);
    EXPECT_EQ(parts_of(index, 9).size(), 2u);
    EXPECT_EQ(two[0].turns + two[1].turns, 2);
    EXPECT_EQ(two[0].size() + two[1].size(), index == 2 ? 2 : 8);
    EXPECT_EQ(two[1].size(), index == 2 ? 0 : 4);
    EXPECT_EQ(two[1].first, index == 2 ? 18 : 8 * index + 4);
    EXPECT_EQ(two[1].like.x.defined(), index == 2);
    EXPECT_EQ(two[0].most_grains(), 1);
  }
}

template <class Source>
std::vector<Batch> all_batches(const Source& source, const BatchOptions& options, const Partner& shard) {
  std::vector<Batch> all;
  for (const Batch& batch : batches(source, options, shard)) all.push_back(batch);
  return all;
}

TEST(Batches, OfAFunctionAreThoseOfTheSameSamplesInMemory) {
  Dataset dataset = numbered(23);
  dataset.x = dataset.x.to(at::kByte).unsqueeze(2);  // which become floats where they lie in memory
  size_t most = 0;
  const Samples read(23, [&](const std::vector<int64_t>& numbers) {
    most = std::max(most, numbers.size());
    const at::Tensor rows = at::tensor(numbers);
    return Dataset{dataset.x.index_select(0, rows), dataset.y.index_select(0, rows)};
  });
  for (const bool shuffle : {true, false}) {
    for (const int64_t grain : {0, 2}) {
      for (int index = 0; index < 4; ++index) {  // the last batch has 2 samples
        const BatchOptions options{.size = 7, .seed = 3, .epoch = 1, .shuffle = shuffle, .grain = grain};
        const Partner shard{.index = index, .count = 4};
        const auto expected = all_batches(dataset, options, shard), found = all_batches(read, options, shard);
        ASSERT_EQ(found.size(), 4u);
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_EQ(found[i].x.scalar_type(), at::kByte);
          EXPECT_TRUE(at::equal(found[i].x.to(at::kFloat).div(255), expected[i].x));
          EXPECT_TRUE(at::equal(found[i].y, expected[i].y));
          EXPECT_EQ(found[i].first, expected[i].first);
          EXPECT_EQ(found[i].global_size, expected[i].global_size);
          EXPECT_GT(found[i].mark, 0);  // of samples in memory, the mark tells some of them too
          EXPECT_EQ(found[i].runs, expected[i].runs);
        }
      }
    }
  }
  EXPECT_EQ(most, 2u);  // a shard reads its own samples alone
}

TEST(Samples, RefuseWhatIsNone) {
  const auto none = [](const std::vector<int64_t>&) { return Dataset{at::zeros({2, 3}), at::zeros({1})}; };
  EXPECT_THAT(error_of([&] { Samples(-1, none); }), HasSubstr("the number of samples is -1"));
  EXPECT_THAT(error_of([] { Samples(3, nullptr); }), HasSubstr("the function that reads samples is empty"));
  EXPECT_THAT(error_of([&] { batches(Samples(3, none), {.size = 2}).begin(); }),
              AllOf(HasSubstr("asked for 2 samples"), HasSubstr("x of sizes [2, 3] and y of sizes [1]")));
  EXPECT_THAT(error_of([] { batches(Samples(), {.size = 2}); }), HasSubstr("must be tensors"));
}

TEST(DataDigests, TellSamplesApart) {
  const auto of = [](const Samples& samples) { return digests_of(samples, {}); };
  const Dataset dataset = numbered(5);
  const DataDigests digests = of(dataset);
  EXPECT_EQ(of(numbered(5)), digests);
  EXPECT_FALSE(of(Dataset{dataset.x, dataset.y + 1}) == digests);
  EXPECT_FALSE(of(Dataset{dataset.x.to(at::kDouble), dataset.y}) == digests);
  EXPECT_FALSE(of(Dataset{dataset.x.flatten(), dataset.y}) == digests);
  const auto none = [](const std::vector<int64_t>&) { return Dataset(); };
  EXPECT_EQ(of(Samples(5, none, "a")), of(Samples(5, none, "a")));
  EXPECT_FALSE(of(Samples(5, none, "a")) == of(Samples(5, none, "b")));
  EXPECT_FALSE(of(Samples(5, none, "a")) == of(Samples(6, none, "a")));
}

TEST(Batches, CountThemselves) {
  EXPECT_EQ(batches(numbered(0), {.size = 4}).count(), 0);
  EXPECT_EQ(batches(numbered(8), {.size = 4}).count(), 2);
  EXPECT_EQ(batches(numbered(9), {.size = 4}).count(), 3);
  EXPECT_EQ(batches(numbered(9), {.size = std::numeric_limits<int64_t>::max()}).count(), 1);
}

TEST(Batches, RefuseBadOptions) {
  auto error = [](const Dataset& dataset, const BatchOptions& options, const Partner& shard = {}) {
    return error_of([&] { batches(dataset, options, shard); });
  };
  EXPECT_THAT(error(numbered(4), {.size = 0}), HasSubstr("batch size 0"));
  EXPECT_THAT(error(numbered(4), {.size = -3}), HasSubstr("batch size -3"));
  EXPECT_THAT(error(numbered(4), {}, {.index = 2, .count = 2}), HasSubstr("shard 2 of 2"));
  EXPECT_THAT(error(numbered(4), {}, {.index = -1, .count = 2}), HasSubstr("shard -1 of 2"));
  EXPECT_THAT(error(numbered(4), {}, {.index = 0, .count = 0}), HasSubstr("shard 0 of 0"));
  EXPECT_THAT(error({at::zeros({4, 2}), at::zeros({5})}, {}), AllOf(HasSubstr("4 samples"), HasSubstr("5")));
  EXPECT_THAT(error({at::zeros({4}), at::Tensor()}, {}), HasSubstr("tensors of samples"));
  EXPECT_THAT(error({at::zeros({4}), at::zeros({4}, at::kMeta)}, {}), AllOf(HasSubstr("cpu"), HasSubstr("meta")));
}

// The meta device stands for another device: what is moved there has its shapes and types.
TEST(Batches, MoveToTheShardsDevice) {
  Dataset dataset{at::zeros({4, 1, 2, 2}, at::kByte), at::zeros({4}, at::kLong)};
  for (bool shuffle : {true, false}) {
    Batches parts = batches(dataset, {.size = 4, .shuffle = shuffle}, {.index = 1, .count = 2, .device = at::kMeta});
    EXPECT_EQ(parts.begin()->x.device(), at::kMeta);
    EXPECT_EQ(parts.begin()->y.device(), at::kMeta);
    EXPECT_EQ(parts.begin()->x.sizes(), (std::vector<int64_t>{2, 1, 2, 2}));
  }
}

// A batch that is a view of the data set: an operation in place would count again in each epoch.
TEST(Batches, RefuseAnOperationInPlaceThatChangesTheDataSet) {
  const auto error = [](const BatchOptions& options, const auto& change) {
    const Dataset dataset{at::ones({6, 2}), at::zeros({6}, at::kLong)};
    return error_of([&] {
      for (auto& batch : batches(dataset, options)) change(batch);
    });
  };
  const BatchOptions in_order{.size = 2, .shuffle = false}, all_at_once{.size = 6, .shuffle = false};
  const auto on_x = [](Batch& batch) { batch.x.div_(2); };
  const auto on_y = [](Batch& batch) { batch.y.add_(1); };
  const auto on_slice = [](Batch& batch) { batch.x.slice(1, 0, 1).zero_(); };
  for (const auto& options : {in_order, all_at_once}) {
    EXPECT_THAT(error(options, on_x), AllOf(HasSubstr("the data set was changed in place"), HasSubstr("clone() it")));
    EXPECT_THAT(error(options, on_y), HasSubstr("changed in place"));
    EXPECT_THAT(error(options, on_slice), HasSubstr("changed in place"));
    EXPECT_EQ(error(options, [](Batch& batch) { batch.x = batch.x.div(2).add_(1); }), "(no error)");
    EXPECT_EQ(error(options, [](Batch& batch) { (batch.x = batch.x.clone()).div_(2); }), "(no error)");
  }
  EXPECT_EQ(error({.size = 2}, on_x), "(no error)");  // gathered rows
}

TEST(Batches, TheirFirstOneMayBeKept) {
  const Dataset dataset{at::ones({6, 2}), at::zeros({6}, at::kLong)};
  const auto& first = *batches(dataset, {.size = 4}).begin();
  EXPECT_EQ(first.size(), 4);
  EXPECT_EQ(first.global_size, 4);
}

TEST(Batches, LetTheDataSetChangeBetweenTwoIterations) {
  const Dataset dataset{at::ones({6, 2}), at::zeros({6}, at::kLong)};
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : batches(dataset, {.size = 2, .shuffle = false})) {
      if (epoch == 0 && batch.x[0][0].item<float>() > 0) break;
    }
    dataset.x.add_(1);
  }
}

}  // namespace data_test
}  // namespace lockstep
