// The state of the optimizers of a SplitModel's ranks as that of the whole network's one, and back: so that a
// checkpoint does not depend on the split.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/optimizer.h>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/split/split_model.hpp>

#include <functional>

#include "io/safetensors.hpp"

namespace lockstep {

// Makes the network that was split, anew; its weights do not matter.
using MakeNet = std::function<torch::nn::Sequential()>;

// As optimizer_state() would have it of the whole network, on every rank. `optimizer` is the one of net.parameters().
// All ranks must call it. Costs nothing more where the network is split by data alone; else as much as another
// SplitModel and a gather() per member, in double precision. Throws Error as optimizer_state does, and if only some
// parameters of a split network have a state.
io::NamedTensors whole_optimizer_state(const torch::optim::Optimizer& optimizer, SplitModel& net, Rank& rank,
                                       const MakeNet& make_net);

// Gives each rank's optimizer its part, whatever the split was that the state comes from. All ranks must call it.
// Throws Error as load_optimizer_state does.
void load_whole_optimizer_state(torch::optim::Optimizer& optimizer, SplitModel& net, Rank& rank,
                                const MakeNet& make_net, const io::NamedTensors& state);

}  // namespace lockstep
