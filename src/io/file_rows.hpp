// FileRows: rows of a safetensors file's tensors, each read from its place, without the rest of the file.
//
// Used by one thread. Cost: one call of the system for rows that follow each other.
#pragma once

#include <cstdint>
#include <filesystem>

#include "safetensors.hpp"

namespace lockstep::io {

class FileRows {
 public:
  // Opens the file. Throws Error, which names it, if that fails or if it is no longer as long as its layout says.
  FileRows(std::filesystem::path file, uint64_t size);
  ~FileRows();
  FileRows(const FileRows&) = delete;
  FileRows& operator=(const FileRows&) = delete;

  // Rows `row` up to row + count of the tensor at this place, into memory of that size. Throws Error, which names the
  // file, if they cannot be read.
  void read(const TensorPlace& place, int64_t row, int64_t count, void* into) const;

 private:
  [[noreturn]] void fail(const std::string& why) const;

  const std::filesystem::path file_;
  const int descriptor_;
};

}  // namespace lockstep::io
