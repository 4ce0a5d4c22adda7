#include "gzip.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>

#include "crc32.hpp"
#include "reason.hpp"

namespace lockstep::io {

GzipReader::GzipReader(const std::filesystem::path& file) : file_(file), bits_(in_) {
  errno = 0;
  std::error_code error;
  file_size_ = std::filesystem::file_size(file, error);
  if (error) throw Error("cannot read '" + file.string() + "': " + error.message());
  in_.open(file, std::ios::binary);
  if (!in_) throw Error("cannot open '" + file.string() + "': " + reason(errno));
  std::array<char, 2> magic{};
  compressed_ = read_plain(magic.data(), magic.size()) == magic.size() && magic == std::array{'\x1f', '\x8b'};
  in_.clear();
  in_.seekg(0);
}

uint64_t GzipReader::max_size() const {
  // Deflate packs at most 258 bytes into 2 bits.
  return compressed_ ? file_size_ * 1032 : file_size_;
}

size_t GzipReader::read(void* into, size_t bytes) {
  if (!compressed_) return read_plain(into, bytes);
  try {
    return read_compressed(into, bytes);
  } catch (const Error& error) {
    throw Error("'" + file_.string() + "': " + error.what());
  }
}

size_t GzipReader::read_plain(void* into, size_t bytes) {
  in_.read(static_cast<char*>(into), static_cast<std::streamsize>(bytes));
  if (in_.bad()) throw Error("cannot read '" + file_.string() + "': " + reason(errno));
  return static_cast<size_t>(in_.gcount());
}

size_t GzipReader::read_compressed(void* into, size_t bytes) {
  auto* out = static_cast<unsigned char*>(into);
  size_t done = 0;
  while (done < bytes) {
    if (!ready_.empty()) {
      const size_t count = std::min(bytes - done, ready_.size());
      std::copy_n(ready_.begin(), count, out + done);
      ready_ = ready_.subspan(count);
      done += count;
      continue;
    }
    if (!member_) {
      if (bits_.at_end()) break;
      begin_member();
    }
    ready_ = member_->more();
    crc_ = crc32_of<kCrc32>(ready_.data(), ready_.size(), crc_);
    size_ += static_cast<uint32_t>(ready_.size());
    if (ready_.empty()) end_member();
  }
  return done;
}

void GzipReader::begin_member() {
  constexpr uint32_t has_crc = 2, has_extra = 4, has_name = 8, has_comment = 16, unknown = 0xe0;
  const auto skip = [&](uint32_t count) {
    for (; count > 0; --count) bits_.take(8);
  };
  if (bits_.take(8) != 0x1f || bits_.take(8) != 0x8b || bits_.take(8) != 8) {
    throw Error("corrupt gzip: something else follows");
  }
  const uint32_t flags = bits_.take(8);
  if ((flags & unknown) != 0) throw Error("corrupt gzip: unknown flags");
  skip(6);  // the time, and where it was compressed
  if ((flags & has_extra) != 0) skip(bits_.take(16));
  for (const uint32_t text : {has_name, has_comment}) {
    while ((flags & text) != 0 && bits_.take(8) != 0) {
    }
  }
  if ((flags & has_crc) != 0) skip(2);
  member_.emplace(bits_);
  crc_ = size_ = 0;
}

void GzipReader::end_member() {
  bits_.skip_to_byte();
  const auto word = [&] {
    const uint32_t low = bits_.take(16);
    return low | bits_.take(16) << 16;
  };
  const uint32_t crc = word(), size = word();
  if (crc != crc_) throw Error("corrupt gzip: incorrect data check");
  if (size != size_) throw Error("corrupt gzip: incorrect length check");
  member_.reset();
}

}  // namespace lockstep::io
