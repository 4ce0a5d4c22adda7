// Sample files: data that are larger than memory, in files of some thousand samples each (elsewhere called shards).
//
//   const auto data = lockstep::samples_of(lockstep::sample_files("crops"), {.shuffle_buffer = 20000});
//   for (auto& batch : lockstep::batches(data, {.size = 256, .epoch = epoch}, rank)) …
//
// A file is a safetensors file, as save_tensors() and Python's safetensors write it. Its tensors have a row for each
// of the file's samples, so they are [n, ...]. A rank reads the rows of its own samples alone, each from its place in
// the file. Each rank's memory holds the batches that are read ahead, and 8 bytes per sample for the epoch's order. The
// position of a run is its step, so a run goes on in the middle of an epoch without reading what came before.
#pragma once

#include <lockstep/data/samples.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

struct SampleFileOptions {
  std::string x = "x";  // the names of the samples and of their targets in the files; the other tensors come as `more`
  std::string y = "y";
  // The order of an epoch, from its seed and number alone: the files in another order each time, and in it the samples
  // through a buffer of so many numbers. The buffer gives a random one of those that it holds, and takes the next. More
  // mix better; fewer keep what is read together closer on the disk. 1: as they lie in the files. with_weights() and
  // with_order() put another order in its place, in which rows may come from all files at once.
  int64_t shuffle_buffer = 10000;
  int read_ahead = 2;  // batches, see Samples::read_ahead()
  // What becomes of the rows of a batch, such as bytes to floats; it must keep their number. Empty: they stay as they
  // are. It is called on the thread that reads ahead.
  std::function<Dataset(Dataset)> transform = {};
};

// The samples of these files. Reads their headers alone. All ranks need the same files, in the same order: what tells
// them apart are names (without folders), sizes, and headers, in which save_tensors() puts a SHA-256 of everything. A
// transform is not compared. Throws Error, which names the file: no file, or none with a sample; one that is no
// safetensors file, that lacks x or y, whose tensors have not as many rows, or whose tensors have other names, types or
// sizes than those of the first file. And later, where a batch is taken: a file that cannot be read or has changed its
// length.
Samples samples_of(const std::vector<std::filesystem::path>& files, const SampleFileOptions& options = {});

// The files *.safetensors in the folder, by name. Throws Error if it cannot be read, or has none.
std::vector<std::filesystem::path> sample_files(const std::filesystem::path& folder);

}  // namespace lockstep
