#include "split_json.hpp"

#include <string>

namespace lockstep {
namespace {

int at_least_1(JsonFields& fields, const std::string& key) {
  const int value = fields.required<int>(key);
  if (value < 1) fields.refuse(key, "at least 1");
  return value;
}

}  // namespace

nlohmann::ordered_json to_json(const ModelSplit& split) {
  return {{"mesh", {{"data", split.mesh.data}, {"pipeline", split.mesh.pipeline}, {"tensor", split.mesh.tensor}}},
          {"schedule", to_string(split.schedule)},
          {"stages_per_rank", split.stages_per_rank},
          {"microbatches", split.microbatches},
          {"recompute", split.recompute},
          {"cuts", split.cuts},
          {"tensor_rule", to_string(split.tensor_rule)}};
}

ModelSplit split_from(JsonFields& fields) {
  ModelSplit split;
  auto mesh = fields.object("mesh");
  split.mesh.data = at_least_1(mesh, "data");
  split.mesh.pipeline = at_least_1(mesh, "pipeline");
  split.mesh.tensor = at_least_1(mesh, "tensor");
  mesh.no_more();
  split.schedule = fields.named("schedule", schedule_from);
  split.stages_per_rank = at_least_1(fields, "stages_per_rank");
  split.microbatches = at_least_1(fields, "microbatches");
  split.recompute = fields.required<bool>("recompute");
  split.cuts = fields.list<int64_t>("cuts");
  split.tensor_rule = fields.named("tensor_rule", tensor_rule_from);
  return split;
}

}  // namespace lockstep
