// Safetensors: named tensors in a file that Python's package safetensors reads and writes.
//
//   8 bytes      length of the header, little-endian
//   header       JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {…}},
//                padded with spaces
//   data         the tensors' bytes, little-endian, without gaps; offsets count from here
// Types: F64 F32 F16 BF16, F8 of five kinds, C64, I64 I32 I16 I8, U64 U32 U16 U8, BOOL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "file_system.hpp"

namespace lockstep::io {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Names the first tensor that no file can hold, and says why: a type that the format lacks (ComplexDouble, quantized
// ones), or a sparse one. Empty if there is none.
std::string what_a_file_lacks(const NamedTensors& tensors);

// A tensor with the bytes that a file has of it: on the CPU, in the order of its sizes. The same one where it can be.
at::Tensor as_in_a_file(const at::Tensor& tensor);

// Writes the tensors, from whatever device, and replaces `file` whole. `metadata` joins {"format": "pt"} in the header.
// Throws Error for a type that the format lacks, a name given twice, text that is not UTF-8, or a disk that does not
// take the file. The old file then stays as it was.
void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {}, FileSystem& files = real_files());

// The file's tensors on the CPU, in the order of their data. Strict: nothing that the header says is believed before it
// is checked against the file's size. `metadata`, if any, gets the texts of the header's. Throws Error that names the
// file and what is wrong.
NamedTensors read_safetensors(const std::filesystem::path& file,
                              std::map<std::string, std::string>* metadata = nullptr);

// What a file's header says, checked against the file's size.
struct TensorPlace {
  std::string name;
  at::ScalarType type;
  std::vector<int64_t> shape;
  uint64_t begin;  // of its bytes, in the file
  uint64_t end;
};
struct FileLayout {
  std::vector<TensorPlace> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
  uint64_t size;  // of the file, in bytes
};
// Throws Error as read_safetensors.
FileLayout read_layout(const std::filesystem::path& file);

// Throws Error for a tensor of bools that holds other bytes than 0 and 1: whoever read it would do anything.
void check_bool(const at::Tensor& tensor, const std::string& name);

// The texts of the header alone: the tensors are neither read nor looked at. Throws Error as read_safetensors.
std::map<std::string, std::string> read_metadata(const std::filesystem::path& file);

// A file may have digest_of() of its tensors and of the rest of its metadata under this key of the metadata.
inline constexpr const char* kDigestKey = "sha256";

// SHA-256 of the texts and of the tensors by name, in hexadecimal digits. {"format": "pt"} is one of the texts.
std::string digest_of(const std::map<std::string, std::string>& metadata, const NamedTensors& tensors);

// Throws Error if the metadata have a digest, and it is not that of the rest of them and of the tensors.
void check_digest(std::map<std::string, std::string> metadata, const NamedTensors& tensors);

}  // namespace lockstep::io
