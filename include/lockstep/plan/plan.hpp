// Plans: how a net is split over devices, what that will cost, and which way is best.
//
// predict() says for any plan how long a step takes, how much memory and how many bytes it needs; make_plan() tries
// every mesh shape, schedule and count of microbatches, with stages balanced exactly for each. The model behind it is
// described in docs/plan.md. Ranks of a mesh are numbered with tensor fastest, then pipeline, then data. Pure functions
// of their arguments: the same on all ranks that pass the same. Thread-safe.
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace torch::nn {
class Sequential;
}

namespace lockstep {

struct Prediction {
  // One rank of the pipeline axis, the slowest of those that stand beside it on the other axes.
  struct RankCost {
    double busy_seconds = 0;     // in which it computes: forward, backward, update
    double parameter_bytes = 0;  // as held by one device,
    double memory_bytes = 0;     // with gradients, optimizer state, and activations at their peak
    double bytes_sent = 0;       // per step, to other ranks
  };

  double step_seconds = 0;
  std::vector<RankCost> ranks;  // one per rank of the pipeline axis

  double idle_share() const;    // the part of the step in which a device does not compute, on average
  double memory_bytes() const;  // of the fullest device
  double bytes_sent() const;    // by the busiest sender
};

struct Plan {
  std::string model;                // ModelProfile::model,
  std::string options;              // ::options
  std::vector<std::string> layers;  // and ::signature, to tell whether a net is the one that was planned for
  std::string devices;              // as parse_devices() reads it; empty for a cluster that is described
  int64_t batch_size = 0;           // of the global batch
  ModelSplit split = {};
  Prediction prediction = {};
};

// What predictions need to know beside the plan.
struct TrainingCost {
  double state_bytes_per_parameter_byte = 0;  // 0: plain SGD; 1: momentum; 2: Adam
};

struct PlanOptions {
  int64_t batch_size = 256;
  TrainingCost training = {};
  std::vector<PipelineSchedule> schedules = {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe,
                                             PipelineSchedule::interleaved};
  int max_stages_per_rank = 4;                       // of the interleaved schedule
  bool data = true, pipeline = true, tensor = true;  // axes that may be longer than 1
  std::string devices = {};                          // for Plan::devices
};

// Throws Error: a plan with more devices than the cluster, with cuts that are not those of stages, or with a tensor
// axis that the model was not profiled for. Memory limits are not looked at.
Prediction predict(const ModelProfile& profile, const Cluster& cluster, const Plan& plan,
                   const TrainingCost& training = {});

// For each mesh shape over all of the cluster's devices, schedule, stages per rank and recompute, the best count of
// microbatches whose memory fits, with its prediction; fastest first. Throws Error: none fits, and how much memory the
// least demanding would need; an option out of its range.
std::vector<Plan> candidate_plans(const ModelProfile& profile, const Cluster& cluster, const PlanOptions& options);

// The simplest of those that are within 1 % of the fastest: without recompute, then fewest tensor ranks, then fewest
// stages. (Times are not known better than that.) Throws Error for an empty list.
Plan best_plan(const std::vector<Plan>& candidates);

Plan make_plan(const ModelProfile& profile, const Cluster& cluster, const PlanOptions& options);

// A plan as JSON text, and back. from_json throws Error that names the key: one that is not known or missing, a value
// of another type or out of its range. read_plan also: a file that cannot be read.
std::string to_json(const Plan& plan);
Plan plan_from_json(std::string_view text);
Plan read_plan(const std::filesystem::path& file);

// A line per layer: its name, and its parameters' names and shapes, "conv1: weight [20, 1, 3, 3], bias [20]"; of one
// that resizes images (torch::nn::Upsample) their size, "resize: to [96, 96]".
std::vector<std::string> model_signature(const torch::nn::Sequential& net);

// Throws Error, which says what would fit, if `net` is not the net that was planned for (and which layer differs), the
// mesh's product is not `devices`, cuts do not lie within the net in ascending order, their number does not go with the
// pipeline axis, or a number is below 1.
void check_plan(const Plan& plan, const torch::nn::Sequential& net, int devices);

}  // namespace lockstep
