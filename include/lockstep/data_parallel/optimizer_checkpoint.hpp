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
