#include "idx.hpp"

#include <ATen/Functions.h>
#include <zlib.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <limits>
#include <system_error>
#include <vector>

#include "base/number_text.hpp"
#include "reason.hpp"
#include "system_library.hpp"

namespace lockstep::io {
namespace {

constexpr size_t buffer_size = 1 << 18;
constexpr int gzip_window_bits = 15 + 16;  // zlib's way of asking for gzip's header and checksum

struct Zlib {
  SystemLibrary library{
      {.library = "zlib", .files = {"libz.so.1"}, .needed_for = "gzipped files", .packages = "zlib (Debian: zlib1g)"}};

  decltype(&::inflateInit2_) inflateInit2_ = library.function<decltype(::inflateInit2_)>("inflateInit2_");
  decltype(&::inflate) inflate = library.function<decltype(::inflate)>("inflate");
  decltype(&::inflateReset) inflateReset = library.function<decltype(::inflateReset)>("inflateReset");
  decltype(&::inflateEnd) inflateEnd = library.function<decltype(::inflateEnd)>("inflateEnd");
  decltype(&::zError) zError = library.function<decltype(::zError)>("zError");
};

// Loads zlib. Throws Error if the system has none.
const Zlib& zlib() {
  static const Zlib loaded;
  return loaded;
}

// GzipReader: reads a file's bytes, and decompresses them if the content (not the name) is gzip.
//
// It is strict: a stream that is cut off, damaged (checksum, length) or followed by something else is an Error that
// names the file. Use it from one thread at a time. Memory: two small buffers. The first gzipped file loads zlib.
class GzipReader {
 public:
  explicit GzipReader(const std::filesystem::path& file) : file_(file), buffer_(buffer_size) {
    errno = 0;
    std::error_code error;
    file_size_ = std::filesystem::file_size(file, error);
    if (error) throw Error("cannot read '" + file.string() + "': " + error.message(), {Error::file});
    in_.open(file, std::ios::binary);
    if (!in_) throw Error("cannot open '" + file.string() + "': " + reason(errno), {Error::file});
    fill();
    compressed_ = stream_.avail_in >= 2 && buffer_[0] == 0x1f && buffer_[1] == 0x8b;
    if (!compressed_) return;
    // Replaces a macro of zlib.h, which cannot call a function of a loaded library.
    const int status = zlib().inflateInit2_(&stream_, gzip_window_bits, ZLIB_VERSION, static_cast<int>(sizeof stream_));
    if (status != Z_OK) throw Error("zlib could not be initialised", {Error::machine});
  }

  ~GzipReader() {
    if (compressed_) zlib().inflateEnd(&stream_);
  }

  GzipReader& operator=(GzipReader&&) = delete;

  // Reads `bytes` bytes into `into`, fewer only at the end of the data. Returns their number.
  size_t read(void* into, size_t bytes) {
    if (compressed_) return read_compressed(into, bytes);
    auto* out = static_cast<unsigned char*>(into);
    size_t done = 0;
    while (done < bytes) {
      if (stream_.avail_in == 0) fill();
      if (stream_.avail_in == 0) break;
      size_t count = std::min<size_t>(bytes - done, stream_.avail_in);
      std::copy_n(stream_.next_in, count, out + done);
      stream_.next_in += count;
      stream_.avail_in -= static_cast<uInt>(count);
      done += count;
    }
    return done;
  }

  // Gives the most bytes that a file of this size can hold. Refuse a header that claims more.
  uint64_t max_size() const {
    // Deflate packs at most 258 bytes into 2 bits.
    return compressed_ ? file_size_ * 1032 : file_size_;
  }

 private:
  size_t read_compressed(void* into, size_t bytes) {
    auto* out = static_cast<unsigned char*>(into);
    size_t done = 0;
    while (done < bytes) {
      if (stream_.avail_in == 0) fill();
      bool at_end = stream_.avail_in == 0;
      if (at_end && between_members_) break;
      if (at_end) throw Error("'" + file_.string() + "' is cut off: its gzip stream ends too early", {Error::file});
      if (between_members_) zlib().inflateReset(&stream_);
      between_members_ = false;

      auto room = static_cast<uInt>(std::min<size_t>(bytes - done, std::numeric_limits<uInt>::max()));
      stream_.next_out = out + done;
      stream_.avail_out = room;
      int status = zlib().inflate(&stream_, Z_NO_FLUSH);
      done += room - stream_.avail_out;
      if (status == Z_STREAM_END) {
        between_members_ = true;
      } else if (status != Z_OK) {
        throw Error("'" + file_.string() + "' is corrupt gzip: " + (stream_.msg ? stream_.msg : zlib().zError(status)),
                    {Error::file});
      }
    }
    return done;
  }

  void fill() {
    in_.read(reinterpret_cast<char*>(buffer_.data()), buffer_size);
    if (in_.bad()) throw Error("cannot read '" + file_.string() + "': " + reason(errno), {Error::file});
    stream_.next_in = buffer_.data();
    stream_.avail_in = static_cast<uInt>(in_.gcount());
  }

  std::filesystem::path file_;
  std::ifstream in_;
  uint64_t file_size_ = 0;
  bool compressed_ = false;
  bool between_members_ = false;  // a gzip member has ended: the file may end here, or another member may follow
  std::vector<unsigned char> buffer_;
  z_stream stream_{};  // the stream's input is buffer_; a plain file does not use the stream
};

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
