#include "plan_report.hpp"

#include <algorithm>

#include "base/number_text.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

using Cells = std::vector<std::string>;

std::string milliseconds(double seconds) {
  return format("%.*f", seconds < 0.001 ? 3 : seconds < 0.1 ? 2 : 1, seconds * 1e3);
}

std::string percent(double share) {
  return format("%.0f %%", 100 * share);
}

std::string schedule_of(const Plan& plan) {
  if (plan.split.mesh.pipeline == 1) return "-";
  std::string text(to_string(plan.split.schedule));
  if (plan.split.stages_per_rank > 1) text += " x" + std::to_string(plan.split.stages_per_rank);
  return text + (plan.split.recompute ? ", recomputing" : "");
}

std::string mesh_of(const MeshShape& mesh) {
  return std::to_string(mesh.data) + " x " + std::to_string(mesh.pipeline) + " x " + std::to_string(mesh.tensor);
}

}  // namespace

std::string layer_table(const ModelProfile& profile, int64_t samples) {
  std::vector<Cells> rows = {{"layer", "parameters", "output", "kept", "forward ms", "backward ms"}};
  const auto add = [&](const LayerProfile& layer) {
    rows.push_back({layer.name, bytes_text(layer.parameter_bytes), bytes_text(layer.output_bytes),
                    bytes_text(std::max(0.0, layer.saved_bytes)),
                    milliseconds(layer.forward.at(static_cast<double>(samples))),
                    milliseconds(layer.backward.at(static_cast<double>(samples)))});
  };
  for (const auto& layer : profile.layers) add(layer);
  add(profile.loss);
  std::string sliced;
  for (const auto& slices : profile.sliced) sliced += (sliced.empty() ? "" : ", ") + std::to_string(slices.ranks);
  return "layers, on one device: bytes per sample, and times of " + std::to_string(samples) + " samples\n" +
         aligned(rows) + "  the update of all parameters takes " + milliseconds(profile.update_seconds) + " ms" +
         (sliced.empty() ? "" : "; also measured in " + sliced + " slices by channels") + "\n";
}

std::string candidate_table(const std::vector<Plan>& plans, const Prediction& alone, size_t most) {
  std::vector<Cells> rows = {
      {"data x pipeline x tensor", "schedule", "microbatches", "step ms", "speed-up", "memory", "sent", "idle"}};
  const auto row = [&](const std::string& mesh, const std::string& schedule, const std::string& microbatches,
                       const Prediction& prediction) {
    rows.push_back({mesh, schedule, microbatches, milliseconds(prediction.step_seconds),
                    format("%.2f", alone.step_seconds / prediction.step_seconds), bytes_text(prediction.memory_bytes()),
                    bytes_text(prediction.bytes_sent()), percent(prediction.idle_share())});
  };
  row("one device", "-", "1", alone);
  for (size_t i = 0; i < std::min(most, plans.size()); ++i) {
    const Plan& plan = plans[i];
    row(mesh_of(plan.split.mesh), schedule_of(plan), std::to_string(plan.split.microbatches), plan.prediction);
  }
  std::string text = "candidates, as predicted; memory and bytes sent per step of the busiest device\n" + aligned(rows);
  if (plans.size() > most) text += "  and " + std::to_string(plans.size() - most) + " slower ones\n";
  return text;
}

std::string in_words(const Plan& plan, const ModelProfile& profile, const Prediction& alone) {
  Rows rows = {{"mesh", to_string(plan.split.mesh)}};
  if (plan.split.mesh.pipeline > 1) {
    std::string stages;
    for (size_t s = 0; s <= plan.split.cuts.size(); ++s) {
      const int64_t first = s == 0 ? 0 : plan.split.cuts[s - 1];
      const auto end = s == plan.split.cuts.size() ? static_cast<int64_t>(profile.layers.size()) : plan.split.cuts[s];
      const auto name = [&](int64_t layer) { return profile.layers[static_cast<size_t>(layer)].name; };
      stages += (s == 0 ? "" : " | ") + name(first) + (end - first > 1 ? " … " + name(end - 1) : "");
    }
    rows.push_back({"stages", stages});
    rows.push_back({"schedule", schedule_of(plan)});
  }
  if (plan.split.mesh.pipeline > 1 || plan.split.microbatches > 1) {
    rows.push_back({"microbatches", std::to_string(plan.split.microbatches)});
  }
  rows.push_back({"step", milliseconds(plan.prediction.step_seconds) + " ms, " +
                              format("%.2f", alone.step_seconds / plan.prediction.step_seconds) +
                              " times as fast as one device"});
  rows.push_back({"memory", bytes_text(plan.prediction.memory_bytes()) + " on the fullest device"});
  return "chosen\n" + table(rows);
}

}  // namespace lockstep::cli
