// tensor_files: keeps any tensors by name in a safetensors file, and hashes a network.
//
// lockstep.hpp does not include it. The files are like those of weights.hpp. Not thread-safe for the same file. Cost:
// one copy of the tensors in memory.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/data/samples.hpp>

#include <filesystem>
#include <map>
#include <string>

namespace lockstep {

// Saves and loads any tensors by name. Saves from any device; load_tensors gives them on the CPU. Throws Error as
// save_weights does, for a tensor that is undefined, and for a file that cannot be read or is corrupt.
void save_tensors(const std::filesystem::path& file, const Dataset::Tensors& tensors,
                  const std::map<std::string, std::string>& metadata = {});
Dataset::Tensors load_tensors(const std::filesystem::path& file);

// Tells two networks apart: the first 16 hexadecimal digits of a SHA-256 over the name, the type, the shape and the
// bytes of every parameter and buffer, in the order of their names. Their layout in memory (channels-last) and their
// device do not matter. A tensor under two names counts once, under the first. A network that was saved and loaded
// again has the same hash. Cost: one pass over the bytes, some 0.1 s for ten million parameters, and on a GPU a copy of
// them.
std::string weights_hash(const torch::nn::Module& module);

}  // namespace lockstep
