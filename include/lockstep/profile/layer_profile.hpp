// Measuring what plans are made from: a net's layers, the ranks' speeds, and the links between them.
//
// Collective: all ranks of a run call these together, and all get the same result. Rank 0 measures the layers while the
// others rest; then all compute at once, which shows how far they slow each other down. A busy machine spoils the
// times. Used by each rank's own thread. The net stays as it is; measuring needs the memory of a training step of it.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>
#include <lockstep/ranks/rank.hpp>

#include <functional>
#include <vector>

namespace lockstep {

struct ProfileOptions {
  double seconds = 10;  // that the layers may take, the whole net's and each slice's; large batches are left out first
  // Into how many slices to try to split the net by channels; those that it cannot be split into are left out.
  std::vector<int> tensor_ranks = {2, 4, 8};
  // Makes rank's slice of the net; shard() with its default rule if empty. The rank given is of a group that is not
  // there: its collectives return this rank's own values.
  std::function<torch::nn::Sequential(const torch::nn::Sequential& net, Rank& rank)> slice = {};
};

// Times are measured for 1, 2, 4, … samples up to all of `sample`, which should be as many as a device will have at
// once; the best of several. Layers are timed one by one within whole steps, and their times scaled so that their sum
// is the time of a whole step. model and options are left for the caller to fill. Throws Error: an empty net or sample,
// a layer that fails (with its name), a net that cannot be cloned; and as Rank's collectives.
ModelProfile profile(const torch::nn::Sequential& net, const Batch& sample, const Criterion& criterion, Rank& rank,
                     const ProfileOptions& options = {});

// The ranks of this run as a cluster of one node: speeds and contention from the profile that they measured, GPUs'
// memory, and links measured here. On the CPU, whose cores also add the gradients, sums do not hide behind backward.
Cluster measured_cluster(const ModelProfile& profile, Rank& rank);

}  // namespace lockstep
