// Fashion-MNIST and MNIST: which files are read, found and refused.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data/fetch_data.hpp>

#include <optional>

#include "data/data_digests.hpp"
#include "data/fashion_mnist_places.hpp"
#include "io/idx.hpp"
#include "support/error_of.hpp"
#include "support/idx_files.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep {
namespace data_test {

using testing::ElementsAre;

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
  Caught error() {
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
  EXPECT_THAT(error(), Fails(Error::file));
  EXPECT_THAT(error_of([&] { load_fashion_mnist(folder_ / "nowhere"); }), Fails(Error::file));
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
  EXPECT_THAT(error_of([&] { load_fashion_mnist(folder_ / "t10k-images-idx3-ubyte"); }), Fails(Error::file));
  std::filesystem::create_directory(folder_ / "within");
  std::filesystem::permissions(folder_.path(), std::filesystem::perms::none);
  {
    const NotRoot nobody;
    EXPECT_THAT(error(), Fails(Error::file));
    EXPECT_THAT(error_of([&] { load_fashion_mnist(folder_ / "within"); }), Fails(Error::file));
  }
  std::filesystem::permissions(folder_.path(), std::filesystem::perms::owner_all);
}

TEST(DatasetTest, OnItsOwnDeviceIsNoCopy) {
  const Dataset data{at::zeros({10, 1, 28, 28}, at::kByte), at::zeros({10}, at::kLong)};
  const Dataset there = data.to(c10::Device(at::kCPU));
  EXPECT_EQ(there.x.const_data_ptr(), data.x.const_data_ptr());
  EXPECT_EQ(there.y.const_data_ptr(), data.y.const_data_ptr());
  EXPECT_EQ(there.x.scalar_type(), at::kByte);
}

TEST_F(FashionMnistTest, RefusesCountsThatDiffer) {
  folder_.write("train-labels-idx1-ubyte.gz", gzipped(labels({9, 0})));
  EXPECT_THAT(error(), Fails(Error::file));
}

TEST_F(FashionMnistTest, RefusesALabelAboveNine) {
  folder_.write("t10k-labels-idx1-ubyte", labels({9, 10}));
  EXPECT_THAT(error(), Fails(Error::file));
  folder_.write("t10k-labels-idx1-ubyte", labels({static_cast<char>(255), 0}));
  EXPECT_THAT(error(), Fails(Error::file));
}

TEST_F(FashionMnistTest, RefusesImagesOfAnotherSize) {
  folder_.write("t10k-images-idx3-ubyte", images(2, 32, 28));
  EXPECT_THAT(error(), Fails(Error::file));
  folder_.write("t10k-images-idx3-ubyte", images(2, 28, 27));
  EXPECT_THAT(error(), Fails(Error::file));
}

TEST_F(FashionMnistTest, RefusesAnEmptySet) {
  folder_.write("t10k-images-idx3-ubyte", images(0));
  folder_.write("t10k-labels-idx1-ubyte", labels(""));
  EXPECT_THAT(error(), Fails(Error::file));
}

TEST_F(FashionMnistTest, RefusesDamagedFiles) {
  folder_.write("train-images-idx3-ubyte.gz", gzipped(images(3)).substr(0, 30));
  EXPECT_THAT(error(), Fails(Error::file));
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
  EXPECT_EQ(find_fashion_mnist({"/nowhere", incomplete.path(), folder_.path(), "/nowhere"}), folder_.path());
  EXPECT_THAT(error_of([&] { find_fashion_mnist({"/nowhere", incomplete.path()}); }), Fails(Error::file));
}

TEST(FashionMnist, IsTheRealThing) {
  if (!std::filesystem::exists(fashion_mnist_places()[0])) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  ImageData data = load_fashion_mnist();
  EXPECT_EQ(data.source, fashion_mnist_places()[0].string());
  EXPECT_EQ(data.train.x.sizes(), (std::vector<int64_t>{60000, 1, 28, 28}));
  EXPECT_EQ(data.test.x.sizes(), (std::vector<int64_t>{10000, 1, 28, 28}));
  EXPECT_TRUE(at::equal(at::bincount(data.train.y), at::full({10}, 6000, at::kLong)));
  EXPECT_TRUE(at::equal(at::bincount(data.test.y), at::full({10}, 1000, at::kLong)));
  EXPECT_NEAR(data.train.x.to(at::kFloat).mean().item<double>() / 255, 0.2860, 1e-4);  // everybody reports this mean
  DataDigests digests = digests_of(data);
  EXPECT_TRUE(is_fashion_mnist(digests));
  digests.test_labels = digests.train_labels;
  EXPECT_FALSE(is_fashion_mnist(digests));
}

// A gzipped file has a checksum; a plain one is known by its neighbours.
TEST(FashionMnist, AFlippedBitInAPlainFileIsRefused) {
  const auto package = fashion_mnist_places()[0];
  if (!std::filesystem::exists(package)) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const ScratchFolder folder;
  for (const char* name : {"train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"})
    std::filesystem::create_symlink(package / name, folder / name);
  const at::Tensor values = io::read_idx(package / "train-labels-idx1-ubyte.gz", 1);
  const auto labels = [&] {
    return idx_bytes(
        {60000}, std::string(static_cast<const char*>(values.const_data_ptr()), static_cast<size_t>(values.numel())));
  };
  folder.write("train-labels-idx1-ubyte", labels());
  EXPECT_NO_THROW(load_fashion_mnist(folder.path()));
  values[30000] = values[30000].item<int64_t>() ^ 1;
  folder.write("train-labels-idx1-ubyte", labels());
  EXPECT_THAT(error_of([&] { load_fashion_mnist(folder.path()); }), Fails(Error::file));
  std::filesystem::remove(folder / "train-labels-idx1-ubyte");
  folder.write("train-labels-idx1-ubyte.gz", gzipped(labels()));  // labels of one's own
  EXPECT_NO_THROW(load_fashion_mnist(folder.path()));
}

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

}  // namespace data_test
}  // namespace lockstep
