#include "idx.hpp"

#include <ATen/Functions.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "base/number_text.hpp"
#include "gzip.hpp"

namespace lockstep::io {
namespace {

class IdxFile {
 public:
  explicit IdxFile(const std::filesystem::path& file) : file_(file), reader_(file) {}

  void check_magic(uint32_t expected) {
    uint32_t found = read_uint32();
    if (found != expected) fail("expected magic number 0x" + hex_text(expected, 8) + ", found 0x" + hex_text(found, 8));
  }

  std::vector<int64_t> read_sizes(int dimensions) {
    std::vector<int64_t> sizes;
    int64_t product = 1;  // the product of the lengths that are not 0: it must fit for the tensor's strides too
    bool overflow = false;
    bool empty = false;
    for (int i = 0; i < dimensions; ++i) {
      sizes.push_back(read_uint32());
      overflow |= __builtin_mul_overflow(product, std::max<int64_t>(sizes.back(), 1), &product);
      empty |= sizes.back() == 0;
    }
    // Asks for no more memory than the file can fill, whatever its header claims.
    uint64_t values = empty ? 0 : static_cast<uint64_t>(product);
    uint64_t most = reader_.max_size() - 4 - 4 * static_cast<uint64_t>(dimensions);
    if (overflow || values > most) {
      fail("truncated, or its header is wrong: it promises " + shape(sizes) +
           " values, but a file of this size holds " + std::to_string(most) + " at most");
    }
    return sizes;
  }

  void read_values(at::Tensor& values) {
    auto expected = static_cast<size_t>(values.numel());
    size_t found = reader_.read(values.mutable_data_ptr<uint8_t>(), expected);
    if (found < expected) {
      fail("truncated: its header promises " + shape(values.sizes()) + " = " + std::to_string(expected) +
           " values, but only " + std::to_string(found) + " follow");
    }
    char more = 0;
    if (reader_.read(&more, 1) != 0) {
      fail("trailing bytes: there are more than the " + shape(values.sizes()) + " = " + std::to_string(expected) +
           " values that its header promises");
    }
  }

 private:
  template <class Sizes>
  static std::string shape(const Sizes& sizes) {
    std::string text;
    for (int64_t size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
    return text;
  }

  uint32_t read_uint32() {
    std::array<unsigned char, 4> bytes{};
    if (reader_.read(bytes.data(), 4) < 4) fail("truncated: it ends within its header");
    return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error("IDX file '" + file_.string() + "': " + what, {Error::file});
  }

  std::filesystem::path file_;
  GzipReader reader_;
};

}  // namespace

at::Tensor read_idx(const std::filesystem::path& file, int dimensions) {
  constexpr uint32_t uint8_values = 0x08;
  IdxFile idx(file);
  idx.check_magic(uint8_values << 8 | static_cast<uint32_t>(dimensions));
  at::Tensor values = at::empty(idx.read_sizes(dimensions), at::kByte);
  idx.read_values(values);
  return values;
}

std::filesystem::path find_idx(const std::filesystem::path& dir, const std::string& name) {
  for (const auto& file : {dir / name, dir / (name + ".gz")}) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(file, ignored)) return file;
  }
  return {};
}

}  // namespace lockstep::io
