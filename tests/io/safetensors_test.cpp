#include "io/safetensors.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <random>

#include "base/seconds_since.hpp"
#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep::io {
namespace safetensors_test {

using testing::ElementsAre;

const std::filesystem::path files = std::filesystem::path(__FILE__).parent_path() / "files";
const std::filesystem::path python_file = files / "python.safetensors";
const std::filesystem::path more_types = files / "python_more_types.safetensors";

std::string bytes_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class SafetensorsTest : public testing::Test {
 protected:
  // The file of this header and these data; the header's length is right unless one is given.
  Caught error(const std::string& header, const std::string& data, std::optional<uint64_t> length = {}) {
    uint64_t size = length.value_or(header.size());
    std::string bytes(sizeof size, '\0');
    std::memcpy(bytes.data(), &size, sizeof size);
    folder_.write("file", bytes + header + data);
    return error_of([&] { read_safetensors(folder_ / "file"); });
  }
  ScratchFolder folder_;
};

TEST_F(SafetensorsTest, ReadsWhatPythonWrote) {
  std::map<std::string, at::Tensor> tensors;
  for (auto& [name, tensor] : read_safetensors(python_file)) tensors[name] = tensor;
  EXPECT_EQ(tensors.size(), 12u);
  auto expect = [&](const std::string& name, const at::Tensor& expected) {
    ASSERT_TRUE(tensors.count(name)) << name;
    EXPECT_EQ(tensors[name].scalar_type(), expected.scalar_type()) << name;
    EXPECT_EQ(tensors[name].sizes(), expected.sizes()) << name;
    EXPECT_TRUE(at::equal(tensors[name], expected)) << name;
  };
  expect("layer.weight", at::tensor({0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 2.5f}).view({2, 3}));
  expect("layer.bias", at::tensor({-1.0f, 3.25f}));
  expect("double", at::tensor({0.1, -1e300}, at::kDouble));
  expect("half", at::tensor({1.5, -2.0}).to(at::kHalf));
  expect("bfloat16", at::tensor({1.5, -2.0}).to(at::kBFloat16));
  expect("steps", at::scalar_tensor(int64_t{9007199254740993}, at::kLong));
  expect("int", at::tensor({-3, 7}, at::kInt));
  expect("short", at::tensor({-3, 7}, at::kShort));
  expect("char", at::tensor({-3, 7}, at::kChar));
  expect("byte", at::tensor({0, 128, 255}, at::kByte));
  expect("mask", at::tensor({1, 0, 0, 1}, at::kByte).to(at::kBool).view({2, 2}));
  expect("empty", at::empty({0, 4}));
}

TEST_F(SafetensorsTest, ReadsTheTypesOfNewerVersions) {
  const NamedTensors read = read_safetensors(more_types);
  const std::map<std::string, at::Tensor> tensors(read.begin(), read.end());
  EXPECT_EQ(tensors.size(), 10u);
  const auto expect = [&](const std::string& name, at::ScalarType type, const at::Tensor& values) {
    ASSERT_TRUE(tensors.contains(name)) << name;
    EXPECT_EQ(tensors.at(name).scalar_type(), type) << name;
    EXPECT_TRUE(at::equal(tensors.at(name).to(values.scalar_type()), values)) << name << tensors.at(name);
  };
  expect("complex", at::kComplexFloat, at::complex(at::tensor({1.5f, 0.0f}), at::tensor({-2.0f, 3.0f})));
  expect("uint16", at::kUInt16, at::tensor({0, 65535}, at::kLong));
  expect("uint32", at::kUInt32, at::tensor({int64_t{0}, int64_t{4294967295}}, at::kLong));
  expect("uint64", at::kUInt64, at::tensor({int64_t{1}, int64_t{-1}}, at::kLong).view({1, 2}));  // the same bits
  expect("e4m3", at::kFloat8_e4m3fn, at::tensor({1.0f, -2.0f, 448.0f}));
  expect("e5m2", at::kFloat8_e5m2, at::tensor({1.0f, -2.0f, 57344.0f}));
  expect("e4m3fnuz", at::kFloat8_e4m3fnuz, at::tensor({1.0f, -2.0f}));
  expect("e5m2fnuz", at::kFloat8_e5m2fnuz, at::tensor({1.0f, -2.0f}));
  expect("e8m0", at::kFloat8_e8m0fnu, at::tensor({1.0f, 2.0f}));
  expect("float", at::kFloat, at::tensor({1.0f, 2.0f}));
}

TEST_F(SafetensorsTest, WritesTheBytesThatPythonWrites) {
  for (const auto& written_by_python : {python_file, more_types}) {
    NamedTensors tensors = read_safetensors(written_by_python);
    std::shuffle(tensors.begin(), tensors.end(), std::mt19937(1));
    write_safetensors(folder_ / "file", tensors);
    EXPECT_EQ(folder_.read("file"), bytes_of(written_by_python));
  }
}

// Such tensors have the bytes of others, and a bit that says how they are meant.
TEST_F(SafetensorsTest, WritesWhatConjugatedAndNegatedViewsShow) {
  const at::Tensor z = at::complex(at::tensor({1.0f}), at::tensor({2.0f}));
  ASSERT_TRUE(at::conj(z).is_conj());
  const at::Tensor negated = at::imag(at::conj(z));
  ASSERT_TRUE(negated.is_neg());
  const NamedTensors tensors = {{"conjugated", at::conj(z)}, {"negated", negated}};
  write_safetensors(folder_ / "file", tensors);
  const NamedTensors read = read_safetensors(folder_ / "file");
  EXPECT_TRUE(at::equal(read[0].second, at::complex(at::tensor({1.0f}), at::tensor({-2.0f}))));
  EXPECT_TRUE(at::equal(read[1].second, at::tensor({-2.0f})));
  EXPECT_EQ(digest_of({}, tensors), digest_of({}, read));
}

TEST_F(SafetensorsTest, KeepsRandomTensors) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 30; ++trial) {
    std::map<std::string, at::Tensor> written;
    int count = static_cast<int>(random() % 6);
    for (int i = 0; i < count; ++i) {
      std::vector<int64_t> shape;
      for (size_t d = random() % 4; d > 0; --d) shape.push_back(random() % 5);
      at::Tensor tensor = at::randn(shape).mul(10).to(std::array{at::kFloat, at::kHalf, at::kLong, at::kChar}[i % 4]);
      if (tensor.dim() >= 2) tensor = tensor.transpose(0, 1);  // not contiguous
      written["names \"with\" ünusual\nletters " + std::to_string(random())] = tensor;
    }
    write_safetensors(folder_ / "file", NamedTensors(written.begin(), written.end()));
    NamedTensors read = read_safetensors(folder_ / "file");
    EXPECT_EQ(read.size(), written.size());
    for (auto& [name, tensor] : read) {
      ASSERT_TRUE(written.count(name)) << name;
      EXPECT_EQ(tensor.scalar_type(), written[name].scalar_type());
      EXPECT_TRUE(at::equal(tensor, written[name])) << name;
    }
  }
}

TEST_F(SafetensorsTest, KeepsEveryBitOfAFloat) {
  at::Tensor odd = at::tensor({0, 1, 0x7fc12345, static_cast<int>(0x80000000), 0x7f800000}, at::kInt);
  write_safetensors(folder_ / "file", {{"odd", odd.view(at::kFloat)}});
  EXPECT_TRUE(at::equal(read_safetensors(folder_ / "file")[0].second.view(at::kInt), odd));
}

TEST_F(SafetensorsTest, AlignsTheData) {
  write_safetensors(folder_ / "file", {{"x", at::ones({1}, at::kByte)}, {"abc", at::ones({1}, at::kDouble)}});
  std::string bytes = folder_.read("file");
  EXPECT_EQ((bytes.size() - 9) % 8, 0u);
  EXPECT_EQ(read_safetensors(folder_ / "file")[0].first, "abc");
}

TEST_F(SafetensorsTest, RefusesToWriteWhatTheFormatLacks) {
  folder_.write("file", "before");
  auto write_error = [&](const NamedTensors& tensors) {
    return error_of([&] { write_safetensors(folder_ / "file", tensors); });
  };
  EXPECT_THAT(write_error({{"z", at::zeros({2}, at::kComplexDouble)}}), Fails(Error::file));
  EXPECT_THAT(write_error({{"s", at::eye(2).to_sparse()}}), Fails(Error::file));
  EXPECT_THAT(write_error({{"a", at::zeros({2})}, {"a", at::zeros({3})}}), Fails(Error::file));
  EXPECT_THAT(write_error({{"\xff", at::zeros({2})}}), Fails(Error::file));
  EXPECT_EQ(folder_.read("file"), "before");
  EXPECT_THAT(folder_.names(), ElementsAre("file"));
}

TEST_F(SafetensorsTest, RefusesTruncationsAndTrailingBytes) {
  std::string bytes = bytes_of(python_file);
  for (size_t size = 0; size < bytes.size(); size += 12) {
    folder_.write("file", bytes.substr(0, size));
    EXPECT_THAT(error_of([&] { read_safetensors(folder_ / "file"); }), Fails(Error::file)) << size;
  }
  folder_.write("file", bytes + "x");
  EXPECT_THAT(error_of([&] { read_safetensors(folder_ / "file"); }), Fails(Error::file));
}

TEST_F(SafetensorsTest, NamesAFileThatIsNotThere) {
  EXPECT_THAT(error_of([&] { read_safetensors(folder_ / "nothing"); }), Fails(Error::file));
  EXPECT_THAT(error_of([&] { read_safetensors(folder_.path()); }), Fails(Error::file));
}

TEST_F(SafetensorsTest, RefusesAHeaderThatIsWrong) {
  EXPECT_THAT(error("{}", "", 3), Fails(Error::file));
  EXPECT_THAT(error("{}", "", ~uint64_t{0}), Fails(Error::file));
  EXPECT_THAT(error("", ""), Fails(Error::file));
  EXPECT_THAT(error(" {}", ""), Fails(Error::file));
  EXPECT_THAT(error("[]", ""), Fails(Error::file));
  EXPECT_THAT(error("{", ""), Fails(Error::file));
  EXPECT_THAT(error("{} x", ""), Fails(Error::file));
  EXPECT_THAT(error("{\"\xff\": 1}", ""), Fails(Error::file));
  EXPECT_EQ(error("{}      ", ""), "(no error)");
  EXPECT_EQ(error(R"({"__metadata__": {"any": "thing"}})", ""), "(no error)");
}

TEST_F(SafetensorsTest, RefusesAnEntryThatIsWrong) {
  std::string four(4, '\0');
  auto entry = [&](const std::string& json) { return error(R"({"w": )" + json + "}", four); };
  EXPECT_EQ(entry(R"({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})"), "(no error)");
  EXPECT_THAT(entry("7"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"shape": [1], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F8", "shape": [1], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": 3, "shape": [1], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [18446744073709551615], "data_offsets": [0, 4]})"),
              Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [4611686018427387904, 4, 1], "data_offsets": [0, 0]})"),
              Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [4294967296, 4294967296, 0], "data_offsets": [0, 0]})"),
              Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F64", "shape": [1], "data_offsets": [0, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [1], "data_offsets": [0]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]})"), Fails(Error::file));
  EXPECT_THAT(entry(R"({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})"), Fails(Error::file));
}

TEST_F(SafetensorsTest, RefusesOverlapsGapsAndNamesThatOccurTwice) {
  std::string eight(8, '\0'), nine(9, '\0');
  auto two = [&](const std::string& second_name, const std::string& first, const std::string& second,
                 const std::string& data = std::string(8, '\0')) {
    return error(R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": )" + first + R"(}, ")" + second_name +
                     R"(": {"dtype": "U8", "shape": [4], "data_offsets": )" + second + "}}",
                 data);
  };
  EXPECT_EQ(two("b", "[0, 4]", "[4, 8]"), "(no error)");
  EXPECT_EQ(two("b", "[4, 8]", "[0, 4]"), "(no error)");
  EXPECT_THAT(two("b", "[0, 4]", "[0, 4]"), Fails(Error::file));
  EXPECT_THAT(two("b", "[0, 4]", "[3, 7]"), Fails(Error::file));
  EXPECT_THAT(two("b", "[1, 5]", "[4, 8]"), Fails(Error::file));
  EXPECT_THAT(two("b", "[0, 4]", "[5, 9]", nine), Fails(Error::file));
  EXPECT_THAT(two("b", "[1, 5]", "[5, 9]", nine), Fails(Error::file));
  EXPECT_THAT(two("a", "[0, 4]", "[4, 8]"), Fails(Error::file));
  EXPECT_THAT(error(R"({"a": {"dtype": "U8", "dtype": "I8", "shape": [8], "data_offsets": [0, 8]}})", eight),
              Fails(Error::file));
}

// The time was once that of the square of their number: a minute for 40,000.
TEST_F(SafetensorsTest, TheTimeToReadGrowsAsTheNumberOfTensors) {
  const auto best_seconds = [&](int count) {
    NamedTensors tensors;
    for (int i = 0; i < count; ++i) tensors.emplace_back("tensor." + std::to_string(i), torch::zeros({1}));
    write_safetensors(folder_ / "many", tensors);
    double best = 1e9;
    for (int attempt = 0; attempt < 3; ++attempt) {
      const double start = thread_seconds();  // other tests run beside this one
      EXPECT_EQ(read_safetensors(folder_ / "many").size(), tensors.size());
      best = std::min(best, thread_seconds() - start);
    }
    return best;
  };
  EXPECT_LT(best_seconds(16'000), 9 * best_seconds(4'000));  // 4 times; of the square, 16
}

TEST_F(SafetensorsTest, RefusesHeadersThatTakeMemoryOutOfProportion) {
  const auto nested = [](size_t levels) {
    return R"({"__metadata__": {"a": )" + std::string(levels, '[') + std::string(levels, ']') + "}}";
  };
  EXPECT_EQ(error(nested(6), ""), "(no error)");
  EXPECT_THAT(error(nested(7), ""), Fails(Error::file));
  EXPECT_THAT(error(nested(1'000'000), ""), Fails(Error::file));
  std::string many = "{";
  for (int i = 0; i < (1 << 17) + 2; ++i) many += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":0";
  EXPECT_THAT(error(many + "}", ""), Fails(Error::file));
}

TEST_F(SafetensorsTest, RefusesABoolThatIsNeitherTrueNorFalse) {
  EXPECT_THAT(error(R"({"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}})", "\x01\x02"),
              Fails(Error::file));
}

}  // namespace safetensors_test
}  // namespace lockstep::io
