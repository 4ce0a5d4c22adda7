// Profiles and clusters of round numbers, for tests of what is predicted from them.
#pragma once

#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>

#include <string>
#include <vector>

namespace lockstep {

// Seconds per sample, without a fixed part.
inline TimeCurve proportional(double seconds_per_sample) {
  return {{{1, seconds_per_sample}, {1024, 1024 * seconds_per_sample}}};
}

// `layers` equal layers: 1 ms forward and 2 ms backward per sample, 1 MB of parameters, 1 kB of output per sample and
// 3 kB kept for backward. The loss and the update take no time.
inline ModelProfile equal_layers(int layers) {
  ModelProfile profile;
  profile.model = "equal";
  profile.input_bytes = 500;
  for (int i = 0; i < layers; ++i) {
    profile.layers.push_back({.name = "layer" + std::to_string(i),
                              .parameter_bytes = 1e6,
                              .output_bytes = 1e3,
                              .saved_bytes = 3e3,
                              .forward = proportional(1e-3),
                              .backward = proportional(2e-3)});
    profile.signature.push_back(profile.layers.back().name + ": weight [250000]");
  }
  profile.loss.name = "loss";
  return profile;
}

// Devices of speed 1 in one node, with links that take no time, which do not slow each other down.
inline Cluster ideal_cluster(int devices) {
  Cluster cluster;
  cluster.devices.resize(static_cast<size_t>(devices));
  cluster.devices_per_node = devices;
  return cluster;
}

}  // namespace lockstep
