// Plans say how a net is split over devices. The functions here predict a plan's cost, and find the best plan.
//
// predict() predicts a step's time, memory and bytes sent for any plan. make_plan() tries every mesh shape, schedule
// and number of microbatches, and balances the stages exactly for each. docs/plan.md describes the model of costs.
// Ranks of a mesh are numbered with tensor fastest, then pipeline, then data. The functions are pure and thread-safe:
// ranks that pass the same arguments get the same results.
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
  // Holds the costs of one rank of the pipeline axis: the slowest of the ranks that stand beside each other on the
  // other axes.
  struct RankCost {
    double busy_seconds = 0;     // seconds of computing: forward, backward, update
    double parameter_bytes = 0;  // the bytes of parameters on one device
    double memory_bytes = 0;     // the bytes of parameters, gradients, optimizer state, and activations at their peak
    double bytes_sent = 0;       // bytes sent to other ranks per step
  };

  double step_seconds = 0;
  std::vector<RankCost> ranks;  // the costs, one per rank of the pipeline axis

  double idle_share() const;    // the share of the step in which a device does not compute, on average
  double memory_bytes() const;  // the bytes on the fullest device
  double bytes_sent() const;    // the bytes that the busiest sender sends
};

struct Plan {
  std::string model;                // ModelProfile::model
  std::string options;              // ModelProfile::options
  std::vector<std::string> layers;  // ModelProfile::signature, to tell whether a net is the one of the plan
  std::string devices;              // the devices as parse_devices() reads them; empty for a described cluster
  int64_t batch_size = 0;           // the number of samples of the global batch
  ModelSplit split = {};
  Prediction prediction = {};
};

// Holds the training's costs, which predictions need beside the plan.
struct TrainingCost {
  double state_bytes_per_parameter_byte = 0;  // the state of the optimizer; 0: plain SGD; 1: momentum; 2: Adam
};

struct PlanOptions {
  int64_t batch_size = 256;
  TrainingCost training = {};
  std::vector<PipelineSchedule> schedules = {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe,
                                             PipelineSchedule::interleaved};
  int max_stages_per_rank = 4;                       // a limit for the interleaved schedule
  bool data = true, pipeline = true, tensor = true;  // axes that may be longer than 1
  std::string devices = {};                          // the devices, copied to Plan::devices
};

// Predicts the plan's cost; memory limits do not matter here. Throws Error for a plan with more devices than the
// cluster, cuts that do not make the stages, or a tensor axis without a profile.
Prediction predict(const ModelProfile& profile, const Cluster& cluster, const Plan& plan,
                   const TrainingCost& training = {});

// Makes a plan for each combination of mesh shape over all devices, schedule, stages per rank and recompute. A plan has
// the best number of microbatches that fits the memory, and its prediction. The fastest comes first. Throws Error for
// an option out of its range, and if nothing fits; the text says how much memory the least demanding plan would need.
std::vector<Plan> candidate_plans(const ModelProfile& profile, const Cluster& cluster, const PlanOptions& options);

// Returns the simplest of the plans that are within 1 % of the fastest, since predicted times are not more exact. The
// simplest plan is without recompute, then has fewest tensor ranks, then fewest stages. Throws Error for an empty list.
Plan best_plan(const std::vector<Plan>& candidates);

Plan make_plan(const ModelProfile& profile, const Cluster& cluster, const PlanOptions& options);

// These convert to and from JSON text. plan_from_json throws Error, which names the key, if a key is missing or
// unknown, or has a value of another type or out of its range. read_plan also throws for a file that cannot be read.
std::string to_json(const Plan& plan);
Plan plan_from_json(std::string_view text);
Plan read_plan(const std::filesystem::path& file);

// Returns one line per layer: its name, and the parameters' names and shapes, as in "conv1: weight [20, 1, 3, 3], bias
// [20]". A layer that resizes images (torch::nn::Upsample) has their size instead: "resize: to [96, 96]".
std::vector<std::string> model_signature(const torch::nn::Sequential& net);

// Throws Error, which says what would fit: `net` is not the net of the plan (the text names the layer that differs);
// the mesh's product is not `devices`; cuts do not ascend within the net or do not go with the pipeline axis; a number
// is below 1.
void check_plan(const Plan& plan, const torch::nn::Sequential& net, int devices);

}  // namespace lockstep
