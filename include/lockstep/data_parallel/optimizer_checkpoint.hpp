// Checkpoints of an optimizer: its state as a safetensors file, by the parameters' names. The weights: weights.hpp.
//
// For a training loop of one's own that stops and goes on with the same bits. The file is as weights.hpp's. Not
// thread-safe for the same file. Cost: one copy of the state in memory.
#pragma once

#include <torch/nn/module.h>

#include <filesystem>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

class ShardedOptimizer;

// Writes the state that `optimizer` has for the parameters of `module`. "exp_avg.fc1.weight" is the member exp_avg of
// the parameter fc1.weight. A step count is an int64 without dimensions. Options (the learning rate, weight decay) are
// not in the file; set them again when you go on. Throws Error if the optimizer has a parameter that the module lacks,
// or a state that cannot be saved, and as save_weights does.
void save_optimizer(const std::filesystem::path& file, const torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module);

// Replaces `optimizer`'s state by the file's. Its next steps then have the bits of an optimizer that never stopped.
// Throws Error, before anything is changed, for a file that load_weights would refuse, a parameter that the module or
// the optimizer lacks, another shape, or the state of another kind of optimizer, and as save_optimizer does.
void load_optimizer(const std::filesystem::path& file, torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module);

// The same for a ShardedOptimizer, through its state() and load_state(). All ranks must call them: rank 0 writes, every
// rank reads. The file holds the whole optimizer's state, so another number of ranks, or one device, can go on from it.
// Cost of saving: an allgather of the state.
void save_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer);
void load_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer);

}  // namespace lockstep
