// Measures a model on this machine's devices, for a plan.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep::cli {

struct MeasuredModel {
  ModelProfile profile;
  Cluster cluster;
};

struct MeasureOptions {
  int64_t batch_size = 256;
  double seconds = 10;  // seconds of measuring, see ProfileOptions
  int threads_per_rank = 1;
  size_t planned_devices = 1;  // the number of devices that a plan is for; it may be larger than the number here
};

// Gives "mlp, width 0.5".
std::string name_of(const ModelProfile& profile);

// Makes so many samples for the model. Their content does not matter.
Dataset stand_in_for(const ModelOptions& model, int64_t samples);

// Profiles the model and the devices' links, with one rank per device. Throws Error as profile() and run() do.
MeasuredModel measure_model(const ModelOptions& model, const Devices& devices, const MeasureOptions& options);

}  // namespace lockstep::cli
