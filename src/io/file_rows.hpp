// FileRows: reads rows of a safetensors file's tensors, each from its place, without the rest of the file.
//
// Use it from one thread. Cost: one call of the system for rows that follow each other.
#pragma once

#include <cstdint>
#include <filesystem>

#include "safetensors.hpp"

namespace lockstep::io {

class FileRows {
 public:
  // Opens the file. Throws Error, which names the file, if that fails or if the file no longer has this size.
  FileRows(std::filesystem::path file, uint64_t size);
  ~FileRows();
  FileRows& operator=(FileRows&&) = delete;

  // Reads the rows [row, row + count) of the tensor at this place. Give an `into` that has room for them. Throws Error,
  // which names the file, if the rows cannot be read.
  void read(const TensorPlace& place, int64_t row, int64_t count, void* into) const;

 private:
  [[noreturn]] void fail(const std::string& why) const;

  const std::filesystem::path file_;
  const int descriptor_;
};

}  // namespace lockstep::io
