// GzipReader: reads a file's bytes, and decompresses them if the file's content (not its name) is gzip.
//
// Strict: a stream that is cut off, damaged (checksum, length) or followed by something else is an Error that names the
// file. One thread at a time. Memory: two small buffers. zlib is loaded when the first gzipped file is read.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <vector>

namespace lockstep::io {

class GzipReader {
 public:
  explicit GzipReader(const std::filesystem::path& file);
  ~GzipReader();
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  // Reads `bytes` bytes into `into`, fewer only at the end of the data. Returns how many.
  size_t read(void* into, size_t bytes);

  // The most bytes that a file of this size can hold. What a header claims must not exceed this.
  uint64_t max_size() const;

 private:
  size_t read_compressed(void* into, size_t bytes);
  void fill();

  std::filesystem::path file_;
  std::ifstream in_;
  uint64_t file_size_ = 0;
  bool compressed_ = false;
  bool between_members_ = false;  // a gzip member has ended: the file may end here, or another member may follow
  std::vector<unsigned char> buffer_;
  z_stream stream_{};  // the stream's input is buffer_; a plain file does not use the stream
};

}  // namespace lockstep::io
