#include <lockstep/base/error.hpp>
#include <lockstep/plan/model_profile.hpp>

#include <algorithm>

#include "io/json_fields.hpp"

namespace lockstep {
namespace {

using nlohmann::ordered_json;

ordered_json to_json(const TimeCurve& curve) {
  ordered_json json = ordered_json::array();
  for (const auto& point : curve.points) json.push_back({{"samples", point.samples}, {"seconds", point.seconds}});
  return json;
}

ordered_json to_json(const std::vector<LayerMessage>& messages) {
  ordered_json json = ordered_json::array();
  for (const auto& message : messages) {
    json.push_back({{"kind", message.kind == LayerMessage::Kind::allreduce ? "allreduce" : "allgather"},
                    {"bytes", message.bytes},
                    {"bytes_per_sample", message.bytes_per_sample}});
  }
  return json;
}

ordered_json to_json(const LayerProfile& layer) {
  return {{"name", layer.name},
          {"parameter_bytes", layer.parameter_bytes},
          {"buffer_bytes", layer.buffer_bytes},
          {"output_bytes", layer.output_bytes},
          {"saved_bytes", layer.saved_bytes},
          {"workspace_bytes", layer.workspace_bytes},
          {"fixed_workspace_bytes", layer.fixed_workspace_bytes},
          {"forward", to_json(layer.forward)},
          {"backward", to_json(layer.backward)},
          {"forward_messages", to_json(layer.forward_messages)},
          {"backward_messages", to_json(layer.backward_messages)}};
}

ordered_json to_json(const std::vector<LayerProfile>& layers) {
  ordered_json json = ordered_json::array();
  for (const auto& layer : layers) json.push_back(to_json(layer));
  return json;
}

TimeCurve curve_from(std::vector<JsonFields> list) {
  TimeCurve curve;
  for (auto& fields : list) {
    curve.points.push_back({fields.required<int64_t>("samples"), fields.required<double>("seconds")});
    fields.no_more();
  }
  return curve;
}

std::vector<LayerMessage> messages_from(std::vector<JsonFields> list) {
  std::vector<LayerMessage> messages;
  for (auto& fields : list) {
    LayerMessage message;
    const auto kind = fields.required<std::string>("kind");
    if (kind != "allreduce" && kind != "allgather") fields.refuse("kind", "allreduce or allgather");
    message.kind = kind == "allreduce" ? LayerMessage::Kind::allreduce : LayerMessage::Kind::allgather;
    message.bytes = fields.required<double>("bytes");
    message.bytes_per_sample = fields.required<double>("bytes_per_sample");
    fields.no_more();
    messages.push_back(message);
  }
  return messages;
}

LayerProfile layer_from(JsonFields fields) {
  LayerProfile layer;
  layer.name = fields.required<std::string>("name");
  layer.parameter_bytes = fields.required<double>("parameter_bytes");
  layer.buffer_bytes = fields.required<double>("buffer_bytes");
  layer.output_bytes = fields.required<double>("output_bytes");
  layer.saved_bytes = fields.required<double>("saved_bytes");
  layer.workspace_bytes = fields.required<double>("workspace_bytes");
  layer.fixed_workspace_bytes = fields.required<double>("fixed_workspace_bytes");
  layer.forward = curve_from(fields.objects("forward"));
  layer.backward = curve_from(fields.objects("backward"));
  layer.forward_messages = messages_from(fields.objects("forward_messages"));
  layer.backward_messages = messages_from(fields.objects("backward_messages"));
  fields.no_more();
  return layer;
}

std::vector<LayerProfile> layers_from(std::vector<JsonFields> list) {
  std::vector<LayerProfile> layers;
  for (auto& fields : list) layers.push_back(layer_from(std::move(fields)));
  return layers;
}

}  // namespace

double TimeCurve::at(double samples) const {
  if (points.empty() || samples <= 0) return 0;
  const auto seconds = [](const Point& point) { return point.seconds; };
  if (samples <= static_cast<double>(points.front().samples)) return points.front().seconds;
  if (points.size() == 1) return seconds(points[0]) * samples / static_cast<double>(points[0].samples);
  const auto above = std::find_if(points.begin() + 1, points.end() - 1,
                                  [&](const Point& point) { return samples <= static_cast<double>(point.samples); });
  const Point &left = *(above - 1), &right = *above;
  const double slope = (right.seconds - left.seconds) / static_cast<double>(right.samples - left.samples);
  if (samples <= static_cast<double>(right.samples)) {
    return left.seconds + slope * (samples - static_cast<double>(left.samples));
  }
  // More samples never take less time, whatever the measurement's noise makes of the last two points.
  return right.seconds + std::max(slope, 0.0) * (samples - static_cast<double>(right.samples));
}

const std::vector<LayerProfile>& layers_of(const ModelProfile& profile, int tensor_ranks) {
  if (tensor_ranks == 1) return profile.layers;
  std::string counts = "1";
  for (const auto& sliced : profile.sliced) {
    if (sliced.ranks == tensor_ranks) return sliced.layers;
    counts += ", " + std::to_string(sliced.ranks);
  }
  throw Error("the profile of " + (profile.model.empty() ? "this net" : "\"" + profile.model + "\"") +
              " has no slices for a tensor axis of " + std::to_string(tensor_ranks) + "; there are those for " +
              counts);
}

std::string to_json(const ModelProfile& profile) {
  ordered_json sliced = ordered_json::array();
  for (const auto& slice : profile.sliced) {
    sliced.push_back({{"ranks", slice.ranks}, {"layers", to_json(slice.layers)}});
  }
  const ordered_json json = {{"model", profile.model},
                             {"options", profile.options},
                             {"signature", profile.signature},
                             {"input_bytes", profile.input_bytes},
                             {"layers", to_json(profile.layers)},
                             {"loss", to_json(profile.loss)},
                             {"sliced", sliced},
                             {"update_seconds", profile.update_seconds},
                             {"speeds", profile.speeds},
                             {"contention", profile.contention}};
  return json.dump(1) + "\n";
}

ModelProfile profile_from_json(std::string_view text) {
  auto fields = JsonFields::parse(text, "profile");
  ModelProfile profile;
  profile.model = fields.required<std::string>("model");
  profile.options = fields.required<std::string>("options");
  profile.signature = fields.list<std::string>("signature");
  profile.input_bytes = fields.required<double>("input_bytes");
  profile.layers = layers_from(fields.objects("layers"));
  profile.loss = layer_from(fields.object("loss"));
  for (auto& slice : fields.objects("sliced")) {
    profile.sliced.push_back({slice.required<int>("ranks"), layers_from(slice.objects("layers"))});
    if (profile.sliced.back().layers.size() != profile.layers.size()) {
      throw Error("profile: the slices for " + std::to_string(profile.sliced.back().ranks) + " ranks have " +
                  std::to_string(profile.sliced.back().layers.size()) + " layers, the whole net has " +
                  std::to_string(profile.layers.size()));
    }
    slice.no_more();
  }
  profile.update_seconds = fields.required<double>("update_seconds");
  profile.speeds = fields.list<double>("speeds");
  profile.contention = fields.list<double>("contention");
  fields.no_more();
  return profile;
}

ModelProfile read_profile(const std::filesystem::path& file) {
  return read_json(file, profile_from_json);
}

}  // namespace lockstep
