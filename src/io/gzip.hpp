// GzipReader: reads a file's bytes, and decompresses them if the content (not the name) is gzip.
//
// It is strict: a stream that is cut off, damaged (checksum, length) or followed by something else is an Error that
// names the file. Use it from one thread at a time. Memory: two small buffers. The first gzipped file loads zlib.
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
  GzipReader& operator=(GzipReader&&) = delete;

  // Reads `bytes` bytes into `into`, fewer only at the end of the data. Returns their number.
  size_t read(void* into, size_t bytes);

  // Gives the most bytes that a file of this size can hold. Refuse a header that claims more.
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
