// Weights: a module's parameters and buffers as a safetensors file, under PyTorch's names; and any other tensors by
// name. The optimizer's state: Optimizer::save().
//
// Python reads a file with safetensors.torch.load_file, for net.load_state_dict, and writes one with save_file. Nothing
// in a file is executable. A file is replaced whole (written beside, then renamed). Not thread-safe for the same file.
// Cost: one copy of the tensors in memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <lockstep/data/samples.hpp>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

// Writes every parameter and buffer of `module`. A tensor that the module holds under two names is written once, under
// the first. `metadata` goes into the file's header, beside PyTorch's {"format": "pt"} and a SHA-256 of everything.
// Throws Error for a type that the format lacks, text that is not UTF-8, or a disk that does not take the file. The
// earlier file then stays as it was.
void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata = {});

struct LoadOptions {
  // false: a name is left out if only the file or only the module has it. So a network can begin with some layers of
  // another one. Another shape or type under the same name is an Error in any case.
  bool strict = true;
};

// The names that were left out, as PyTorch's load_state_dict(strict=False) gives them. Both lists are empty if all fit.
struct UnmatchedNames {
  std::vector<std::string> missing;     // names that only the module has: these tensors stay as they were
  std::vector<std::string> unexpected;  // names that only the file has
};

// Copies the file's tensors into `module`. Throws Error, before anything is changed, if the file cannot be read or is
// corrupt; if the header has a SHA-256, a single wrong bit is noticed. Throws also if a name has another shape or type,
// or, with `strict`, if a name is missing or unknown. The text names it and shows both.
UnmatchedNames load_weights(const std::filesystem::path& file, torch::nn::Module& module,
                            const LoadOptions& options = {});

// Saves and loads any tensors by name. Saves from any device; load_tensors gives them on the CPU. Throws Error as
// save_weights does, for a tensor that is undefined, and for a file that cannot be read or is corrupt.
void save_tensors(const std::filesystem::path& file, const TensorsByName& tensors,
                  const std::map<std::string, std::string>& metadata = {});
TensorsByName load_tensors(const std::filesystem::path& file);

// Tells two networks apart: the first 16 hexadecimal digits of a SHA-256 over the name, the type, the shape and the
// bytes of every parameter and buffer, in the order of their names. Their layout in memory (channels-last) and their
// device do not matter. A tensor under two names counts once, under the first. A network that was saved and loaded
// again has the same hash. Cost: one pass over the bytes, some 0.1 s for ten million parameters, and on a GPU a copy of
// them.
std::string weights_hash(const torch::nn::Module& module);

}  // namespace lockstep
