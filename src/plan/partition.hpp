// Finds the best cuts of a chain of layers into stages, one per device: exactly, by dynamic programming.
//
// It uses no LibTorch, and has no state.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

struct Partition {
  struct Layer {
    double seconds = 0;          // seconds of a microbatch's forward and backward, on a device of speed 1
    double cut_seconds = 0;      // seconds that the messages of a cut behind this layer cost the stages on both sides
    double fixed_bytes = 0;      // bytes held whatever is computed: parameters, gradients, optimizer state
    double live_bytes = 0;       // bytes held for each microbatch between its forward and backward
    double cut_bytes = 0;        // such bytes of the next stage, for its input, if there is a cut behind this layer
    double workspace_bytes = 0;  // bytes held while the layer computes; the largest of a stage counts
  };
  struct Device {
    double speed = 1;
    double memory_bytes = 0;    // 0: no limit
    int live_microbatches = 1;  // the number of microbatches whose activations a stage there holds at once
  };

  std::vector<Layer> layers;
  std::vector<Device> stages;  // the stages' devices: for each stage the one on which it lives
};

// A stage's seconds are the sum over its layers on the stage's device and over the cuts on both sides. A stage's bytes
// are its layers' parameters, the activations and inputs of all microbatches held at once, and the largest workspace.

// Give both functions a partition with at least one stage, and at least as many layers as stages.

// Cuts the layers into contiguous stages of at least one layer, so that the slowest stage is as fast as possible. Among
// such partitions it takes one whose cuts cost least in sum. Returns the first layers of stages 1, 2, …; nothing if no
// partition fits the memory. Stages get the devices in the given order, and no stage exceeds its device's memory. Takes
// stages * layers² steps.
std::optional<std::vector<int64_t>> fitting_stages(const Partition& partition);

// Returns the partition whose fullest device uses the least share of its memory. (Devices without a limit count as
// empty.)
std::vector<int64_t> leanest_stages(const Partition& partition);

}  // namespace lockstep
