#include <lockstep/error.hpp>
#include <lockstep/plan.hpp>

#include <string>

#include "io/read_text.hpp"
#include "json_fields.hpp"

namespace lockstep {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const Prediction& prediction) {
  ordered_json ranks = ordered_json::array();
  for (const auto& rank : prediction.ranks) {
    ranks.push_back({{"busy_seconds", rank.busy_seconds},
                     {"parameter_bytes", rank.parameter_bytes},
                     {"memory_bytes", rank.memory_bytes},
                     {"bytes_sent", rank.bytes_sent}});
  }
  return {{"step_seconds", prediction.step_seconds}, {"ranks", ranks}};
}

int at_least_1(JsonFields& fields, const std::string& key) {
  const int value = fields.required<int>(key);
  if (value < 1) fields.refuse(key, "at least 1");
  return value;
}

double not_negative(JsonFields& fields, const std::string& key) {
  const double value = fields.required<double>(key);
  if (value < 0) fields.refuse(key, "at least 0");
  return value;
}

Prediction prediction_from(JsonFields fields) {
  Prediction prediction;
  prediction.step_seconds = not_negative(fields, "step_seconds");
  for (auto& rank : fields.objects("ranks")) {
    prediction.ranks.push_back({.busy_seconds = not_negative(rank, "busy_seconds"),
                                .parameter_bytes = not_negative(rank, "parameter_bytes"),
                                .memory_bytes = not_negative(rank, "memory_bytes"),
                                .bytes_sent = not_negative(rank, "bytes_sent")});
    rank.no_more();
  }
  fields.no_more();
  return prediction;
}

}  // namespace

std::string to_json(const Plan& plan) {
  const ordered_json json = {
      {"model", plan.model},
      {"options", plan.options},
      {"layers", plan.layers},
      {"devices", plan.devices},
      {"mesh",
       {{"data", plan.split.mesh.data}, {"pipeline", plan.split.mesh.pipeline}, {"tensor", plan.split.mesh.tensor}}},
      {"batch_size", plan.batch_size},
      {"schedule", to_string(plan.split.schedule)},
      {"stages_per_rank", plan.split.stages_per_rank},
      {"microbatches", plan.split.microbatches},
      {"recompute", plan.split.recompute},
      {"cuts", plan.split.cuts},
      {"tensor_rule", plan.split.tensor_rule},
      {"prediction", to_json(plan.prediction)}};
  return json.dump(2) + "\n";
}

Plan plan_from_json(std::string_view text) {
  auto fields = JsonFields::parse(text, "plan");
  Plan plan;
  plan.model = fields.required<std::string>("model");
  plan.options = fields.required<std::string>("options");
  plan.layers = fields.list<std::string>("layers");
  plan.devices = fields.required<std::string>("devices");
  auto mesh = fields.object("mesh");
  plan.split.mesh.data = at_least_1(mesh, "data");
  plan.split.mesh.pipeline = at_least_1(mesh, "pipeline");
  plan.split.mesh.tensor = at_least_1(mesh, "tensor");
  mesh.no_more();
  plan.batch_size = fields.required<int64_t>("batch_size");
  if (plan.batch_size < 1) fields.refuse("batch_size", "at least 1");
  const auto schedule = fields.required<std::string>("schedule");
  try {
    plan.split.schedule = schedule_from(schedule);
  } catch (const Error& error) {
    throw Error(std::string("plan: the value of \"schedule\": ") + error.what());
  }
  plan.split.stages_per_rank = at_least_1(fields, "stages_per_rank");
  plan.split.microbatches = at_least_1(fields, "microbatches");
  plan.split.recompute = fields.required<bool>("recompute");
  plan.split.cuts = fields.list<int64_t>("cuts");
  plan.split.tensor_rule = fields.required<std::string>("tensor_rule");
  plan.prediction = prediction_from(fields.object("prediction"));
  fields.no_more();
  return plan;
}

Plan read_plan(const std::filesystem::path& file) {
  const std::string text = io::read_text(file);
  try {
    return plan_from_json(text);
  } catch (const Error& error) {
    throw Error(file.string() + ": " + error.what());
  }
}

}  // namespace lockstep
