// TfEvents: writes a file of numbers over steps that TensorBoard reads.
//
//   record   8 bytes length, 4 bytes masked CRC-32C of the length, the bytes of an Event, 4 bytes their masked CRC-32C
//   Event    protocol buffer: 1 wall_time (double), 2 step (varint), 3 file_version (text; only in the first record),
//            5 summary { 1 value { 1 tag (text), 2 simple_value (float) } … }, 7 session_log { 1 status (1: START) }
// Numbers are little-endian. Sources: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto,
// summary.proto. Records are appended, since TensorBoard follows an open file. It ignores a record cut off by a crash.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::io {

using Scalars = std::vector<std::pair<std::string, double>>;  // tags and values; a value is kept as a float

class TfEvents {
 public:
  // Begins the file. Give one that does not exist yet. From `first_step` on TensorBoard no longer shows what other
  // files in the folder hold. `now` is in seconds since 1970. Throws Error if the file cannot be written.
  TfEvents(std::filesystem::path file, double now, int64_t first_step);
  ~TfEvents();
  TfEvents& operator=(TfEvents&&) = delete;

  // Throws Error if the file cannot be written.
  void add(double now, int64_t step, const Scalars& scalars);

 private:
  void append(const std::string& event);

  std::filesystem::path file_;
  int fd_ = -1;
};

// Gives the checksum of a record. Its Castagnoli polynomial is 0x1EDC6F41 (RFC 3720, appendix B.4).
uint32_t crc32c(const std::string& bytes);

}  // namespace lockstep::io
