// Reads IDX, the format of MNIST's files: a magic number, a 32-bit big-endian length per dimension, then uint8 values.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

namespace lockstep::io {

// Reads an IDX file as a uint8 tensor with `dimensions` dimensions (1: labels, magic 0x00000801; 3: images, magic
// 0x00000803). The file may be gzipped; its content tells. Throws Error, which names the file, what was expected and
// what was found: another magic, lengths that the file cannot hold, too few or too many bytes, damaged gzip.
at::Tensor read_idx(const std::filesystem::path& file, int dimensions);

// Gives `dir`/`name` or `dir`/`name`.gz, whichever is there, or an empty path if neither is.
std::filesystem::path find_idx(const std::filesystem::path& dir, const std::string& name);

}  // namespace lockstep::io
