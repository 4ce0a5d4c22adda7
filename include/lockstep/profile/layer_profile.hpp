// Measures the basis of plans: a net's layers, the ranks' speeds, and the links between them.
//
// Call these functions on all ranks of a run, each on its rank's own thread; all ranks get the same result. Rank 0
// measures the layers while the others rest. Then all compute at once, which shows how far they slow each other down. A
// busy machine spoils the times. The net stays as it is. Measuring needs the memory of a training step.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>
#include <lockstep/ranks/rank.hpp>

#include <vector>

namespace lockstep {

struct ProfileOptions {
  double seconds = 10;  // seconds for the whole net, and for each of tensor_ranks; large batches are left out first
  // The numbers of slices into which to split the net by channels. Numbers that do not fit the net are left out.
  std::vector<int> tensor_ranks = {2, 4, 8};
};

// Measures times for 1, 2, 4, … samples up to all of `sample`, and keeps the best of several. Give a `sample` with as
// many samples as a device will have at once. Layers are timed one by one within whole steps. Then their times are
// scaled to add up to the time of a whole step. Fill in model and options yourself. Throws Error for an empty net or
// sample, a layer that fails (the text names it), a net that cannot be cloned, and as Rank's collectives do.
ModelProfile profile(const torch::nn::Sequential& net, const Batch& sample, const Criterion& criterion, Rank& rank,
                     const ProfileOptions& options = {});

// Describes the ranks of this run as a cluster of one node. Speeds and contention come from the profile, which these
// ranks must have measured, memory from the GPUs, and links are measured here. On the CPU sums do not hide behind
// backward, since the same cores compute and add.
Cluster measured_cluster(const ModelProfile& profile, Rank& rank);

}  // namespace lockstep
