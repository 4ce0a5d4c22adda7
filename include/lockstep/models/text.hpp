// Text: makes the bytes of a file samples for a language model, which learns the next byte.
//
// A sample is a sequence of `context` bytes, and the targets are the bytes that follow each of them. Sequences lie one
// behind the other, so every byte is a target once. The last tenth of the file is held out. Memory: the file's bytes.
#pragma once

#include <lockstep/data/samples.hpp>

#include <cstdint>
#include <filesystem>
#include <string>

namespace lockstep {

struct TextData {
  Samples train;  // x and y [n, context], int64 from 0 to 255; read from memory by a thread-safe function
  Samples test;   // the bytes that are held out
  std::string source;
};

// Throws Error, which names the file, if the file cannot be read, or if a tenth of it is not longer than the context.
// Throws Error for a context below 1.
TextData load_text(const std::filesystem::path& file, int64_t context);

}  // namespace lockstep
