// Reads and writes safetensors files: named tensors, as Python's package safetensors reads and writes them.
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

// Names the first tensor that no file can hold, and says why: the format lacks its type (ComplexDouble, quantized
// types), or has no sparse tensors. Gives "" if a file can hold all of them.
std::string what_a_file_lacks(const NamedTensors& tensors);

// Gives a tensor with the bytes that a file holds: on the CPU, in the order of its sizes. This is `tensor` if it is so
// already.
at::Tensor as_in_a_file(const at::Tensor& tensor);

// Writes the tensors, from whatever device, and replaces `file` whole. `metadata` joins {"format": "pt"} in the header.
// Throws Error for a type that the format lacks, a name given twice, text that is not UTF-8, or a disk that does not
// take the file. The old file then stays as it was.
void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {}, FileSystem& files = real_files());

// Reads the file's tensors to the CPU, in the order of their data. It is strict: each number in the header is checked
// against the file's size before it is used. `metadata`, if not null, gets the header's texts. Throws Error that names
// the file and what is wrong.
NamedTensors read_safetensors(const std::filesystem::path& file,
                              std::map<std::string, std::string>* metadata = nullptr);

// Holds a tensor's entry in a file's header, checked against the file's size.
struct TensorPlace {
  std::string name;
  at::ScalarType type;
  std::vector<int64_t> shape;
  uint64_t begin;  // where its bytes begin and end, in the file
  uint64_t end;
};
struct FileLayout {
  std::vector<TensorPlace> tensors;  // the tensors' places in the order of their data
  std::map<std::string, std::string> metadata;
  uint64_t size;  // the file's size in bytes
};
// Reads the header alone; the tensors are neither read nor checked. Throws Error as read_safetensors does.
FileLayout read_layout(const std::filesystem::path& file);

// Throws Error for a tensor of bools that holds other bytes than 0 and 1, since reading them as bools is undefined.
void check_bool(const at::Tensor& tensor, const std::string& name);

// A file's metadata may have under this key digest_of() of its tensors and of the rest of the metadata.
inline constexpr const char* kDigestKey = "sha256";

// Gives the SHA-256 of the texts and the tensors by name, in hexadecimal digits. {"format": "pt"} is one of the texts.
std::string digest_of(const std::map<std::string, std::string>& metadata, const NamedTensors& tensors);

// Throws Error if the metadata have a digest that is not digest_of() of the tensors and of the rest of the metadata.
void check_digest(std::map<std::string, std::string> metadata, const NamedTensors& tensors);

}  // namespace lockstep::io
