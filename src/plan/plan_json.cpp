#include <lockstep/plan/plan.hpp>

#include <string>

#include "io/json_fields.hpp"
#include "layout/split_json.hpp"

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
  ordered_json json = {{"model", plan.model},
                       {"options", plan.options},
                       {"layers", plan.layers},
                       {"devices", plan.devices},
                       {"batch_size", plan.batch_size}};
  json.update(to_json(plan.split));
  json["prediction"] = to_json(plan.prediction);
  return json.dump(2) + "\n";
}

Plan plan_from_json(std::string_view text) {
  auto fields = JsonFields::parse(text, "plan");
  Plan plan;
  plan.model = fields.required<std::string>("model");
  plan.options = fields.required<std::string>("options");
  plan.layers = fields.list<std::string>("layers");
  plan.devices = fields.required<std::string>("devices");
  plan.batch_size = fields.required<int64_t>("batch_size");
  if (plan.batch_size < 1) fields.refuse("batch_size", "at least 1");
  plan.split = split_from(fields);
  plan.prediction = prediction_from(fields.object("prediction"));
  fields.no_more();
  return plan;
}

Plan read_plan(const std::filesystem::path& file) {
  return read_json(file, plan_from_json);
}

}  // namespace lockstep
