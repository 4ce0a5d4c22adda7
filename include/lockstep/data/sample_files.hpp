// Sample files hold data that are larger than memory: some thousand samples per file (elsewhere called a shard).
//
//   const auto data = lockstep::samples_of(lockstep::sample_files("crops"), {.shuffle_buffer = 20000});
//   for (auto& batch : lockstep::batches(data, {.size = 256, .epoch = epoch}, rank)) …
//
// A file is a safetensors file, as save_tensors() and Python's safetensors write it. Each tensor has a row for each of
// the file's samples, and so the shape [n, ...]. A rank reads the rows of its own samples alone, each by a read at the
// row's place. Each rank's memory holds the batches that are read ahead, and 8 bytes per sample for the epoch's order.
// A run goes on in the middle of an epoch without reading earlier samples, since the step alone tells the position.
#pragma once

#include <lockstep/data/samples.hpp>

#include <filesystem>
#include <vector>

namespace lockstep {

using SampleFileOptions [[deprecated("lockstep::Samples::FileOptions")]] = Samples::FileOptions;

// Makes Samples of these files. Reads their headers alone. Give all ranks the same files, in the same order. Files are
// compared by names (without folders), sizes, and headers, in which save_tensors() puts a SHA-256 of everything. A
// transform is not compared. Throws Error, which names the file: there is no file, or none has a sample; a file is no
// safetensors file, or lacks x or y; a file's tensors differ in their numbers of rows, or in names, types or sizes from
// the first file's. Throws later, where a batch is taken, if a file cannot be read or has changed its length.
Samples samples_of(const std::vector<std::filesystem::path>& files, const Samples::FileOptions& options = {});

// Lists the files *.safetensors in the folder, by name. Throws Error if the folder cannot be read, or has no such file.
std::vector<std::filesystem::path> sample_files(const std::filesystem::path& folder);

}  // namespace lockstep
