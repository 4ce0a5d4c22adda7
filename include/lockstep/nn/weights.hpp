// Weights: keeps a module's parameters and buffers in a safetensors file, under PyTorch's names.
// Optimizer::save() keeps the optimizer's state, and tensor_files.hpp has functions for any other tensors.
//
// Python reads a file with safetensors.torch.load_file, for net.load_state_dict, and writes one with save_file. Nothing
// in a file is executable. A file is replaced whole (written beside, then renamed). Not thread-safe for the same file.
// Cost: one copy of the tensors in memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

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

// Lists the names that were left out, as PyTorch's load_state_dict(strict=False) does. Both lists are empty if all fit.
struct UnmatchedNames {
  std::vector<std::string> missing;     // names that only the module has: these tensors stay as they were
  std::vector<std::string> unexpected;  // names that only the file has
};

// Copies the file's tensors into `module`. Throws Error, before anything is changed, if the file cannot be read or is
// corrupt; if the header has a SHA-256, a single wrong bit is noticed. Throws also if a name has another shape or type,
// or, with `strict`, if a name is missing or unknown. The text names it and shows both. Without `strict` a name is left
// out if only the file or only the module has it. So a network can begin with some layers of another one.
UnmatchedNames load_weights(const std::filesystem::path& file, torch::nn::Module& module, bool strict = true);

struct [[deprecated("load_weights(file, module, strict)")]] LoadOptions {
  bool strict = true;
};
[[deprecated("load_weights(file, module, strict)")]] inline UnmatchedNames load_weights(
    const std::filesystem::path& file, torch::nn::Module& module, const LoadOptions& options) {
  return load_weights(file, module, options.strict);
}

}  // namespace lockstep
