// GzipReader: the bytes of a file, decompressed if the file's content (not its name) is gzip (RFC 1952).
//
// Strict: a stream that is cut off, damaged (checksum, length) or followed by something else is an Error that names the
// file. One thread at a time. Memory: some small buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>

#include "inflate.hpp"

namespace lockstep::io {

class GzipReader {
 public:
  explicit GzipReader(const std::filesystem::path& file);
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  // Reads `bytes` bytes into `into`, fewer only at the end of the data; returns how many.
  size_t read(void* into, size_t bytes);

  // A bound for what a header may claim: no more than this can come out of a file of this size.
  uint64_t max_size() const;

 private:
  size_t read_plain(void* into, size_t bytes);
  size_t read_compressed(void* into, size_t bytes);
  void begin_member();
  void end_member();

  std::filesystem::path file_;
  std::ifstream in_;
  uint64_t file_size_ = 0;
  bool compressed_ = false;
  BitReader bits_;
  std::optional<Inflate> member_;           // empty: between members, where the file may end
  std::span<const unsigned char> ready_{};  // came out, and was not read yet
  uint32_t crc_ = 0, size_ = 0;             // of what came out of the member
};

}  // namespace lockstep::io
