// ModelProfile holds the costs of each layer of a net: times, bytes, messages.
//
// profile() (layer_profile.hpp) measures it, and predictions know nothing else of a model. Bytes that grow with the
// batch are per sample. These are plain values without LibTorch. They share no state: thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Gives seconds as a function of the number of samples, measured at some points. Between two points the function is a
// straight line. Below the first point it stays constant; above the last one the line of the last two goes on.
struct TimeCurve {
  struct Point {
    int64_t samples;
    double seconds;
  };
  std::vector<Point> points = {};  // the points in ascending order of samples; none: everything takes no time

  double at(double samples) const;  // gives 0 for no samples
};

// Describes a collective between the ranks that share a layer's channels.
struct LayerMessage {
  enum class Kind { allreduce, allgather };

  Kind kind = Kind::allreduce;
  double bytes = 0;             // the bytes of the whole tensor that do not depend on the batch
  double bytes_per_sample = 0;  // the bytes that each sample adds
};

struct LayerProfile {
  std::string name;                       // the layer's name in the net
  double parameter_bytes = 0;             // the bytes of the parameters; the gradients have as many
  double buffer_bytes = 0;                // the bytes of running statistics
  double output_bytes = 0;                // the bytes of the output, per sample
  double saved_bytes = 0;                 // bytes per sample that forward keeps until the layer's backward
  double workspace_bytes = 0;             // bytes per sample that only a running forward or backward needs
  double fixed_workspace_bytes = 0;       // workspace bytes whatever the batch, as a gradient before it is added
  TimeCurve forward = {}, backward = {};  // times on a device of speed 1 with no other work, without communication
  std::vector<LayerMessage> forward_messages = {}, backward_messages = {};
};

// Holds the layers of each of `ranks` ranks that split the net by channels.
struct SlicedLayers {
  int ranks = 1;
  std::vector<LayerProfile> layers;
};

struct ModelProfile {
  std::string model;                   // the name for make_model()
  std::string options;                 // the other options of make_model(), as text for plans; nobody reads it here
  std::vector<std::string> signature;  // model_signature() of the net: a line per layer
  double input_bytes = 0;              // the bytes of the input, per sample
  std::vector<LayerProfile> layers;    // the layers of the whole net
  LayerProfile loss;                   // the criterion's costs
  std::vector<SlicedLayers> sliced;    // ascending by ranks, from 2; numbers that do not divide the net are left out
  double update_seconds = 0;           // seconds of the optimizer's step for all parameters
  std::vector<double> speeds;          // the speeds of the ranks that measured, each working alone; rank 0's is 1
  std::vector<double> contention;      // see Cluster::contention
};

// Returns the layers of the whole net for one rank, or of a slice for several. Throws Error, which lists the profiled
// numbers of ranks.
const std::vector<LayerProfile>& layers_of(const ModelProfile& profile, int tensor_ranks);

// These convert to and from JSON text. profile_from_json throws Error, which names the key, if a key is missing or
// unknown, or has a value of another type. read_profile also throws for a file that cannot be read.
std::string to_json(const ModelProfile& profile);
ModelProfile profile_from_json(std::string_view text);
ModelProfile read_profile(const std::filesystem::path& file);

}  // namespace lockstep
