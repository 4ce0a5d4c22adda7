#include "io/idx.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "support/error_of.hpp"
#include "support/idx_files.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep::io {
namespace idx_test {

std::string some_values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::string values;
  while (values.size() < count) values += static_cast<char>(random() & 0x3f);  // six bits, so that gzip has work to do
  return values;
}

class IdxTest : public testing::Test {
 protected:
  at::Tensor read(const std::string& bytes, int dimensions) {
    folder_.write("file", bytes);
    return read_idx(folder_ / "file", dimensions);
  }
  Caught error(const std::string& bytes, int dimensions) {
    return error_of([&] { read(bytes, dimensions); });
  }
  ScratchFolder folder_;
};

TEST_F(IdxTest, ReadsLabels) {
  at::Tensor labels = read(idx_bytes({3}, std::string("\x00\x09\xff", 3)), 1);
  EXPECT_TRUE(at::equal(labels, at::tensor({0, 9, 255}, at::kByte)));
}

TEST_F(IdxTest, ReadsImagesOfManySizesPlainAndGzipped) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    uint32_t n = random() % 40, height = random() % 30, width = random() % 30;
    if (seed == 19) n = 1000, height = width = 40;  // several times the reader's buffer
    std::string values = some_values(size_t{n} * height * width, seed);
    at::Tensor expected = at::from_blob(values.data(), {n, height, width}, at::kByte);
    std::string bytes = idx_bytes({n, height, width}, values);
    EXPECT_TRUE(at::equal(read(bytes, 3), expected)) << n << ' ' << height << ' ' << width;
    EXPECT_TRUE(at::equal(read(gzipped(bytes), 3), expected)) << n << ' ' << height << ' ' << width;
  }
}

TEST_F(IdxTest, ReadsAGzipFileOfTwoMembers) {
  std::string bytes = idx_bytes({4}, "abcd");
  at::Tensor labels = read(gzipped(bytes.substr(0, 9)) + gzipped(bytes.substr(9)), 1);
  EXPECT_TRUE(at::equal(labels, at::tensor({'a', 'b', 'c', 'd'}, at::kByte)));
}

TEST_F(IdxTest, NamesTheFile) {
  EXPECT_THAT(error("", 1), Fails(Error::file));
  EXPECT_THAT(error_of([&] { read_idx(folder_ / "nothing", 1); }), Fails(Error::file));
  EXPECT_THAT(error_of([&] { read_idx(folder_.path(), 1); }), Fails(Error::file));
}

TEST_F(IdxTest, RefusesAnotherMagicNumber) {
  EXPECT_THAT(error(idx_bytes({2, 1, 1}, "ab"), 1), Fails(Error::file));
  EXPECT_THAT(error(idx_bytes({2}, "ab"), 3), Fails(Error::file));
  EXPECT_THAT(error("<html>404</html>", 1), Fails(Error::file));
  EXPECT_THAT(error(gzipped("<html>404</html>"), 1), Fails(Error::file));
}

TEST_F(IdxTest, RefusesEveryTruncation) {
  std::string bytes = idx_bytes({4, 2, 2}, some_values(16, 1));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THAT(error(gzipped(bytes.substr(0, size)), 3), Fails(Error::file)) << size;
    EXPECT_THAT(error(bytes.substr(0, size), 3), Fails(Error::file)) << size;
  }
  std::string one_missing = bytes.substr(0, bytes.size() - 1);
  EXPECT_THAT(error(one_missing, 3), Fails(Error::file));
  EXPECT_THAT(error(gzipped(one_missing), 3), Fails(Error::file));
}

TEST_F(IdxTest, RefusesTrailingBytes) {
  EXPECT_THAT(error(idx_bytes({2}, "abc"), 1), Fails(Error::file));
  EXPECT_THAT(error(gzipped(idx_bytes({2}, "abc")), 1), Fails(Error::file));
  EXPECT_THAT(error(gzipped(idx_bytes({2}, "ab")) + "garbage", 1), Fails(Error::file));
  EXPECT_THAT(error(gzipped(idx_bytes({2}, "ab")) + std::string(8, '\0'), 1), Fails(Error::file));
}

TEST_F(IdxTest, RefusesEveryCutOfAGzipFile) {
  std::string bytes = gzipped(idx_bytes({100}, some_values(100, 2)));
  for (size_t size = 2; size < bytes.size(); ++size) {
    EXPECT_THAT(error(bytes.substr(0, size), 1), Fails(Error::file)) << size;
  }
}

TEST_F(IdxTest, RefusesAGzipFileWithAFlippedBit) {
  std::string bytes = gzipped(idx_bytes({100}, some_values(100, 3)));
  std::string wrong_crc = bytes;
  wrong_crc[bytes.size() - 8] ^= 1;
  EXPECT_THAT(error(wrong_crc, 1), Fails(Error::file));
  std::string wrong_length = bytes;
  wrong_length[bytes.size() - 4] ^= 1;
  EXPECT_THAT(error(wrong_length, 1), Fails(Error::file));
  for (size_t i = 10; i < bytes.size() - 8; ++i) {  // wherever the damage is: an error, whichever
    std::string damaged = bytes;
    damaged[i] ^= 0x10;
    EXPECT_NE(error(damaged, 1), "(no error)") << i;
  }
}

TEST_F(IdxTest, DoesNotAllocateWhatAHeaderMerelyClaims) {
  EXPECT_THAT(error(idx_bytes({0xffffffff}, "ab"), 1), Fails(Error::file));
  EXPECT_THAT(error(idx_bytes({0xffffffff, 0xffffffff, 0xffffffff}, "ab"), 3), Fails(Error::file));
  EXPECT_THAT(error(gzipped(idx_bytes({60000, 0xffff, 0xffff}, "ab")), 3), Fails(Error::file));
  EXPECT_THAT(error(idx_bytes({0, 0xffffffff, 0xffffffff}, ""), 3), Fails(Error::file));
}

TEST_F(IdxTest, FindsAFileUnderBothNames) {
  EXPECT_EQ(find_idx(folder_.path(), "labels"), "");
  folder_.write("labels.gz", "");
  EXPECT_EQ(find_idx(folder_.path(), "labels"), folder_ / "labels.gz");
  folder_.write("labels", "");
  EXPECT_EQ(find_idx(folder_.path(), "labels"), folder_ / "labels");
}

}  // namespace idx_test
}  // namespace lockstep::io
