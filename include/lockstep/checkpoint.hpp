// Checkpoints: a module's parameters and buffers, and an optimizer's state, as safetensors files.
//
// Python reads them with safetensors.torch.load_file; weights have PyTorch's names, for net.load_state_dict. Nothing in
// a file is executable. It is replaced whole (written beside, then renamed). Not thread-safe for the same file. Cost:
// one copy of the tensors in memory.
#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <map>
#include <string>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

class ShardedOptimizer;

// Writes every parameter and buffer of `module`. A tensor that the module holds under two names is written once, under
// the first. `metadata` goes into the file's header, beside PyTorch's {"format": "pt"} and a SHA-256 of everything.
// Throws Error: a tensor of a type that the format lacks, text that is not UTF-8, a disk that does not take the file;
// the file of before stays as it was.
void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata = {});

// Copies the file's tensors into `module`. Throws Error, before anything is changed, if the file cannot be read or is
// corrupt (where the header has a SHA-256, to the last bit), or if a name is missing, unknown, or has another shape or
// type: the text names it and shows both.
void load_weights(const std::filesystem::path& file, torch::nn::Module& module);

// Writes what `optimizer` remembers of the parameters of `module`: "exp_avg.fc1.weight" is the member exp_avg of the
// parameter fc1.weight. A count of steps is an int64 without dimensions. Options (the learning rate, weight decay) are
// not in the file: whoever goes on sets them again. Throws Error: a parameter of the optimizer that is not one of the
// module's, a state that cannot be saved, and as save_weights.
void save_optimizer(const std::filesystem::path& file, const torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module);

// Gives the file's state to `optimizer`, in the place of what it has. Its next steps have the bits of one that never
// stopped. Throws Error, before anything is changed: a file as load_weights refuses it, a parameter that the module or
// the optimizer does not have, another shape, the state of another kind of optimizer, and as save_optimizer.
void load_optimizer(const std::filesystem::path& file, torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module);

// The same for a ShardedOptimizer, through its state() and load_state(). All ranks must call them: rank 0 writes, every
// rank reads. The file is that of the whole optimizer, so that another number of ranks can go on, or one device. Cost
// of saving: an allgather of the state.
void save_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer);
void load_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer);

}  // namespace lockstep
