// The state of the optimizers of a SplitModel's ranks as that of the whole network's one, and back. So a checkpoint
// does not depend on the split.
//
// Each rank knows where its tensors belong. A stage's parameters have the network's names, and a layer that is split by
// channels knows the dimension of its slices. So the slices are joined over the tensor axis, and the stages shared over
// the pipeline axis.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/split/split_model.hpp>

#include "io/safetensors.hpp"

namespace lockstep {

// Gives what optimizer_state() would have of the whole network, on every rank. `optimizer` is the one of
// net.parameters(). All ranks must call it. It costs nothing more where the network is split by data alone, and
// elsewhere the state's bytes over the pipeline and tensor axes. Throws Error as optimizer_state does, and if the state
// of a sliced parameter is neither a number nor of the slice's shape.
io::NamedTensors whole_optimizer_state(const torch::optim::Optimizer& optimizer, SplitModel& net);

// Gives each rank's optimizer its part, whatever the split was that the state comes from. All ranks must call it.
// Throws Error as load_optimizer_state does.
void load_whole_optimizer_state(torch::optim::Optimizer& optimizer, SplitModel& net, const io::NamedTensors& state);

}  // namespace lockstep
