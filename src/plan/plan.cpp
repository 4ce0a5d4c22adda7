#include <lockstep/base/error.hpp>
#include <lockstep/plan/plan.hpp>

#include <algorithm>
#include <optional>
#include <tuple>

#include "base/number_text.hpp"
#include "cost_model.hpp"
#include "partition.hpp"

namespace lockstep {
namespace {

// With more microbatches than this a pipeline of p ranks is idle for less than 1 / 17 of the time.
constexpr int microbatches_per_rank = 16;

bool allowed(const MeshShape& mesh, const PlanOptions& options) {
  return (mesh.data == 1 || options.data) && (mesh.pipeline == 1 || options.pipeline) &&
         (mesh.tensor == 1 || options.tensor);
}

// Returns the numbers 1, 2, 4, 8, …: so the parts of a batch that is a power of two have sizes that were measured.
// Kernels choose their way by the size, so 10 samples may take longer than 16.
std::vector<int> microbatch_counts(int64_t part, int ranks) {
  const int64_t most = ranks == 1 ? part : std::min<int64_t>(part, int64_t{microbatches_per_rank} * ranks);
  std::vector<int> counts;
  for (int64_t power = 1; power <= most; power *= 2) {
    counts.push_back(static_cast<int>(power));
  }
  return counts;
}

std::vector<std::pair<PipelineSchedule, int>> schedules(const PlanOptions& options, int pipeline, int layers) {
  if (pipeline == 1) return {{PipelineSchedule::one_f_one_b, 1}};  // one rank has nothing to choose
  std::vector<std::pair<PipelineSchedule, int>> result;
  for (const PipelineSchedule schedule : options.schedules) {
    const int least = schedule == PipelineSchedule::interleaved ? 2 : 1;
    const int most = schedule == PipelineSchedule::interleaved ? options.max_stages_per_rank : 1;
    for (int stages = least; stages <= most && pipeline * stages <= layers; ++stages) {
      result.emplace_back(schedule, stages);
    }
  }
  return result;
}

bool profiled(const ModelProfile& profile, int tensor) {
  return tensor == 1 || std::any_of(profile.sliced.begin(), profile.sliced.end(),
                                    [&](const SlicedLayers& sliced) { return sliced.ranks == tensor; });
}

std::string words_of(const Plan& plan) {
  return to_string(plan.split.mesh) + ", " + std::to_string(plan.split.microbatches) + " microbatches" +
         (plan.split.recompute ? ", recomputing" : "");
}

// Tries plans. If none fits, it knows the one that lacks least.
class Search {
 public:
  Search(const ModelProfile& profile, const Cluster& cluster, const PlanOptions& options)
      : profile_(profile), cluster_(cluster), options_(options) {}

  std::vector<Plan> run() {
    const auto layers = static_cast<int>(profile_.layers.size());
    for (const auto& mesh : mesh_shapes(static_cast<int>(cluster_.devices.size()))) {
      if (!allowed(mesh, options_)) continue;
      if (mesh.data > options_.batch_size || mesh.pipeline > layers || !profiled(profile_, mesh.tensor)) continue;
      const CostModel costs(profile_, cluster_, options_.training, mesh, options_.batch_size);
      for (const auto& [schedule, stages_per_rank] : schedules(options_, mesh.pipeline, layers)) {
        all_fit_ = true;
        ModelSplit split{.mesh = mesh, .schedule = schedule, .stages_per_rank = stages_per_rank};
        try_counts(costs, split);
        // Computing twice pays only where memory is short.
        if (all_fit_) continue;
        split.recompute = true;
        try_counts(costs, split);
      }
    }
    if (found_.empty()) refuse();
    std::stable_sort(found_.begin(), found_.end(), [](const Plan& a, const Plan& b) {
      return a.prediction.step_seconds < b.prediction.step_seconds;
    });
    return found_;
  }

 private:
  void try_counts(const CostModel& costs, ModelSplit split) {
    std::optional<Plan> best;
    for (const int count : microbatch_counts(costs.part(), split.mesh.pipeline)) {
      split.microbatches = count;
      auto plan = try_one(costs, split);
      if (plan && (!best || plan->prediction.step_seconds < best->prediction.step_seconds)) best = std::move(plan);
      if (best && split.mesh.pipeline == 1) break;  // more microbatches need less memory, and take longer
    }
    if (best) found_.push_back(*best);
  }

  std::optional<Plan> try_one(const CostModel& costs, const ModelSplit& split) {
    Partition partition = costs.partition(split);
    const auto plan_of = [&](std::vector<int64_t> cuts) {
      Plan plan{.model = profile_.model,
                .options = profile_.options,
                .layers = profile_.signature,
                .devices = options_.devices,
                .batch_size = options_.batch_size,
                .split = split};
      plan.split.cuts = std::move(cuts);
      plan.prediction = costs.predict(plan.split);
      return plan;
    };
    if (const auto cuts = fitting_stages(partition)) {
      Plan plan = plan_of(*cuts);
      if (fits(costs, plan)) return plan;
    }
    all_fit_ = false;
    // The partition gives each stage of a rank the same share of the memory. The stages may fit together even if one
    // exceeds its share.
    Plan plan = plan_of(leanest_stages(partition));
    if (fits(costs, plan)) return plan;
    if (!least_ || plan.prediction.memory_bytes() < least_->prediction.memory_bytes()) least_ = plan;
    return {};
  }

  static bool fits(const CostModel& costs, const Plan& plan) {
    for (size_t p = 0; p < plan.prediction.ranks.size(); ++p) {
      const double limit = costs.memory_limit(static_cast<int>(p));
      if (limit > 0 && plan.prediction.ranks[p].memory_bytes > limit) return false;
    }
    return true;
  }

  [[noreturn]] void refuse() const {
    const std::string net = profile_.model.empty() ? "the net" : "\"" + profile_.model + "\"";
    if (least_) {
      double most = 0;
      for (const auto& device : cluster_.devices) most = std::max(most, device.memory_bytes);
      throw Error("no plan for " + net + " fits the devices' memory: the one that needs least (" + words_of(*least_) +
                  ") needs " + bytes_text(least_->prediction.memory_bytes()) + " on a device, and the largest has " +
                  bytes_text(most) + ". More devices or a smaller batch need less");
    }
    std::string tensor = "1";
    for (const auto& sliced : profile_.sliced) tensor += ", " + std::to_string(sliced.ranks);
    throw Error("no mesh over " + std::to_string(cluster_.devices.size()) + " devices fits " + net + ": a batch of " +
                std::to_string(options_.batch_size) + " has at most as many parts, " +
                std::to_string(profile_.layers.size()) +
                " layers make at most as many stages, and its channels split into " + tensor);
  }

  const ModelProfile& profile_;
  const Cluster& cluster_;
  const PlanOptions& options_;
  std::vector<Plan> found_;
  std::optional<Plan> least_;
  bool all_fit_ = true;
};

}  // namespace

double Prediction::idle_share() const {
  double busy = 0;
  for (const auto& rank : ranks) busy += rank.busy_seconds;
  return step_seconds > 0 ? 1 - busy / static_cast<double>(ranks.size()) / step_seconds : 0;
}

double Prediction::memory_bytes() const {
  double most = 0;
  for (const auto& rank : ranks) most = std::max(most, rank.memory_bytes);
  return most;
}

double Prediction::bytes_sent() const {
  double most = 0;
  for (const auto& rank : ranks) most = std::max(most, rank.bytes_sent);
  return most;
}

void check_plan_shape(const Plan& plan, int64_t layers) {
  if (plan.batch_size < 1) {
    throw Error("plan: batch_size is " + std::to_string(plan.batch_size) + "; it must be at least 1");
  }
  try {
    check_split(plan.split, layers);
    if (plan.split.cuts.empty() && plan.split.stages() > 1) {
      throw Error(std::to_string(plan.split.stages()) + " stages need " + std::to_string(plan.split.stages() - 1) +
                  " cuts, and there are 0");
    }
  } catch (const Error& error) {
    throw Error(std::string("plan: ") + error.what(), error.data());
  }
}

Prediction predict(const ModelProfile& profile, const Cluster& cluster, const Plan& plan,
                   const TrainingCost& training) {
  check_plan_shape(plan, static_cast<int64_t>(profile.layers.size()));
  const CostModel costs(profile, cluster, training, plan.split.mesh, plan.batch_size);
  // A part with fewer samples than microbatches makes fewer microbatches.
  ModelSplit split = plan.split;
  split.microbatches = static_cast<int>(std::min<int64_t>(split.microbatches, costs.part()));
  return costs.predict(split);
}

std::vector<Plan> candidate_plans(const ModelProfile& profile, const Cluster& cluster, const PlanOptions& options) {
  check_cluster(cluster);
  if (profile.layers.empty()) throw Error("a net without layers cannot be planned for");
  if (options.batch_size < 1) {
    throw Error("the batch size is " + std::to_string(options.batch_size) + "; it must be at least 1");
  }
  if (options.max_stages_per_rank < 1) {
    throw Error("max_stages_per_rank is " + std::to_string(options.max_stages_per_rank) + "; it must be at least 1");
  }
  if (!(options.training.state_bytes_per_parameter_byte >= 0)) {
    throw Error("state_bytes_per_parameter_byte must be at least 0");
  }
  return Search(profile, cluster, options).run();
}

Plan best_plan(const std::vector<Plan>& candidates) {
  if (candidates.empty()) throw Error("there is no plan to choose from");
  const auto faster = [](const Plan& a, const Plan& b) {
    return a.prediction.step_seconds < b.prediction.step_seconds;
  };
  const double fastest = std::min_element(candidates.begin(), candidates.end(), faster)->prediction.step_seconds;
  const auto difficulty = [](const Plan& plan) {
    return std::tuple(plan.split.recompute, plan.split.mesh.tensor,
                      plan.split.mesh.pipeline * plan.split.stages_per_rank, plan.prediction.memory_bytes(),
                      plan.split.microbatches);
  };
  const Plan* best = nullptr;
  for (const auto& plan : candidates) {
    if (plan.prediction.step_seconds > fastest * 1.01) continue;
    if (best == nullptr || difficulty(plan) < difficulty(*best)) best = &plan;
  }
  return *best;
}

Plan make_plan(const ModelProfile& profile, const Cluster& cluster, const PlanOptions& options) {
  return best_plan(candidate_plans(profile, cluster, options));
}

}  // namespace lockstep
