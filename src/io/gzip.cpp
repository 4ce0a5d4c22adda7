#include "gzip.hpp"

#include "reason.hpp"
#include "system_library.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>

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

}  // namespace

GzipReader::GzipReader(const std::filesystem::path& file) : file_(file), buffer_(buffer_size) {
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

GzipReader::~GzipReader() {
  if (compressed_) zlib().inflateEnd(&stream_);
}

uint64_t GzipReader::max_size() const {
  // Deflate packs at most 258 bytes into 2 bits.
  return compressed_ ? file_size_ * 1032 : file_size_;
}

size_t GzipReader::read(void* into, size_t bytes) {
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

size_t GzipReader::read_compressed(void* into, size_t bytes) {
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

void GzipReader::fill() {
  in_.read(reinterpret_cast<char*>(buffer_.data()), buffer_size);
  if (in_.bad()) throw Error("cannot read '" + file_.string() + "': " + reason(errno), {Error::file});
  stream_.next_in = buffer_.data();
  stream_.avail_in = static_cast<uInt>(in_.gcount());
}

}  // namespace lockstep::io
