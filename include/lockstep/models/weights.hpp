// Weights: a module's parameters and buffers as a safetensors file, under PyTorch's names. The optimizer's state:
// optimizer_checkpoint.hpp.
//
// Python reads it with safetensors.torch.load_file, for net.load_state_dict. Nothing in a file is executable. It is
// replaced whole (written beside, then renamed). Not thread-safe for the same file. Cost: one copy of the tensors in
// memory.
#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <map>
#include <string>

namespace lockstep {

// Writes every parameter and buffer of `module`. A tensor that the module holds under two names is written once, under
// the first. `metadata` goes into the file's header, beside PyTorch's {"format": "pt"} and a SHA-256 of everything.
// Throws Error for a type that the format lacks, text that is not UTF-8, or a disk that does not take the file. The
// earlier file then stays as it was.
void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata = {});

// Copies the file's tensors into `module`. Throws Error, before anything is changed, if the file cannot be read or is
// corrupt; if the header has a SHA-256, a single wrong bit is noticed. Also throws if a name is missing or unknown, or
// has another shape or type. The text names it and shows both.
void load_weights(const std::filesystem::path& file, torch::nn::Module& module);

}  // namespace lockstep
