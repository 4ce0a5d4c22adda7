// ModelProfile: what each layer of a net costs: times, bytes, messages.
//
// Measured by profile() (layer_profile.hpp); all that predictions know of a model. Bytes that grow with the batch are
// per sample. Plain values; no LibTorch. Thread-safe: no shared state.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Seconds as a function of the number of samples: measured at some numbers, a straight line between two of them. Below
// the smallest number its time, above the largest as between the last two.
struct TimeCurve {
  struct Point {
    int64_t samples;
    double seconds;
  };
  std::vector<Point> points = {};  // in ascending order of samples; none: everything takes no time

  double at(double samples) const;  // 0 for no samples
};

// A collective between the ranks that share a layer's channels.
struct LayerMessage {
  enum class Kind { allreduce, allgather };

  Kind kind = Kind::allreduce;
  double bytes = 0;             // of the whole tensor, whatever the batch,
  double bytes_per_sample = 0;  // and these beside them
};

struct LayerProfile {
  std::string name;                  // in the net
  double parameter_bytes = 0;        // the gradients have as many
  double buffer_bytes = 0;           // running statistics
  double output_bytes = 0;           // per sample
  double saved_bytes = 0;            // per sample: what a forward adds to the memory held until the layer's backward
  double workspace_bytes = 0;        // per sample: what its forward or backward needs beside that while it runs,
  double fixed_workspace_bytes = 0;  // and this whatever the batch: a gradient before it is added
  TimeCurve forward = {}, backward = {};  // alone on the device with speed 1, communication not counted
  std::vector<LayerMessage> forward_messages = {}, backward_messages = {};
};

// The net as one of `ranks` ranks holds it that split it by channels.
struct SlicedLayers {
  int ranks = 1;
  std::vector<LayerProfile> layers;
};

struct ModelProfile {
  std::string model;                   // its name and
  std::string options;                 // what else make_model() needs, as text; for plans, not read here
  std::vector<std::string> signature;  // model_signature() of the net: a line per layer
  double input_bytes = 0;              // per sample
  std::vector<LayerProfile> layers;    // the whole net
  LayerProfile loss;                   // the criterion
  std::vector<SlicedLayers> sliced;    // in ascending order of ranks, from 2; not for counts that do not divide the net
  double update_seconds = 0;           // the optimizer's step, of all parameters
  std::vector<double> speeds;          // of the ranks that measured, each alone; rank 0's is 1
  std::vector<double> contention;      // as Cluster::contention
};

// Of the whole net for one rank, or of a slice. Throws Error that names the counts there are.
const std::vector<LayerProfile>& layers_of(const ModelProfile& profile, int tensor_ranks);

// All of it as JSON text, to keep or to send. from_json throws Error that names the key which is missing, not known, or
// has a value of another type. read_profile also: a file that cannot be read.
std::string to_json(const ModelProfile& profile);
ModelProfile profile_from_json(std::string_view text);
ModelProfile read_profile(const std::filesystem::path& file);

}  // namespace lockstep
