// The best cuts of a chain of layers into stages, one per device: exact, by dynamic programming.
//
// No LibTorch, no state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

struct Partition {
  struct Layer {
    std::string name;            // for errors
    double seconds = 0;          // of forward and backward of a microbatch, on a device of speed 1
    double cut_seconds = 0;      // that a cut behind this layer costs the stages on both sides: what crosses it
    double fixed_bytes = 0;      // held whatever is computed: parameters, gradients, optimizer state
    double live_bytes = 0;       // held for each microbatch between its forward and its backward
    double cut_bytes = 0;        // the same, of the stage behind a cut behind this layer: its input
    double workspace_bytes = 0;  // held while the layer computes; the largest of a stage counts
  };
  struct Device {
    double speed = 1;
    double memory_bytes = 0;    // 0: no limit
    int live_microbatches = 1;  // for how many microbatches a stage there holds activations at once
  };

  std::vector<Layer> layers;
  std::vector<Device> stages;  // where stage 0, 1, … lives
};

// A stage's seconds are its layers' on its device and those of its cuts on both sides; its bytes those of its layers'
// parameters, of the activations and inputs of the microbatches that it holds at once, and the largest workspace.

// The first layers of stages 1, 2, … of the partition into contiguous stages, each of at least one layer, whose slowest
// stage is fastest, and among those one whose cuts cost least in sum. Stages get the devices in their given order. No
// stage exceeds its device's memory. Takes stages * layers² steps. Throws Error: more stages than layers; no partition
// fits the memory, and what would.
std::vector<int64_t> balanced_stages(const Partition& partition);
// The same; nothing where no partition fits the memory.
std::optional<std::vector<int64_t>> fitting_stages(const Partition& partition);

// The partition whose fullest device, measured by what it has, is least full. (Devices without a limit are empty.)
std::vector<int64_t> leanest_stages(const Partition& partition);

}  // namespace lockstep
