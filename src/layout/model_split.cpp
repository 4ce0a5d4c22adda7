#include <lockstep/base/error.hpp>
#include <lockstep/layout/model_split.hpp>

#include "base/names.hpp"

#include <array>
#include <utility>

namespace lockstep {
namespace {

constexpr std::array tensor_rules{std::pair{TensorRule::channels, "channels"},
                                  std::pair{TensorRule::alternating, "alternating"}};

std::string joined(const std::vector<int64_t>& cuts) {
  std::string text;
  for (const int64_t cut : cuts) text += (text.empty() ? "" : ", ") + std::to_string(cut);
  return text;
}

std::string text_of(const std::vector<int64_t>& cuts) {
  return "[" + joined(cuts) + "]";
}

}  // namespace

std::string to_string(const MeshShape& shape) {
  return std::to_string(shape.data) + " x " + std::to_string(shape.pipeline) + " x " + std::to_string(shape.tensor) +
         " (data x pipeline x tensor)";
}

std::vector<MeshShape> mesh_shapes(int ranks) {
  if (ranks < 1) throw Error("a mesh of " + std::to_string(ranks) + " ranks; it needs at least one");
  std::vector<MeshShape> shapes;
  for (int data = ranks; data >= 1; --data) {
    if (ranks % data != 0) continue;
    for (int pipeline = ranks / data; pipeline >= 1; --pipeline) {
      if (ranks / data % pipeline == 0) shapes.push_back({data, pipeline, ranks / data / pipeline});
    }
  }
  return shapes;
}

void check_mesh(const MeshShape& shape, int ranks) {
  const bool positive = shape.data >= 1 && shape.pipeline >= 1 && shape.tensor >= 1;
  if (positive && shape.size() == ranks) return;
  std::string fitting;
  for (const auto& other : mesh_shapes(ranks)) {
    const std::string text = to_string(other);
    fitting += (fitting.empty() ? "" : ", ") + text.substr(0, text.find(" ("));
  }
  throw Error("a mesh of " + to_string(shape) + " does not fit " + std::to_string(ranks) +
                  (ranks == 1 ? " device" : " devices") + "; what would: " + fitting,
              {.options = {"mesh"}});
}

std::string_view to_string(TensorRule rule) {
  return name_in(tensor_rules, rule);
}

TensorRule tensor_rule_from(std::string_view name) {
  return value_in(tensor_rules, name, "the tensor rule");
}

std::string to_string(const ModelSplit& split) {
  std::string text = to_string(split.mesh);
  if (split.stages() > 1) text += ", " + std::string(to_string(split.schedule));
  if (split.stages_per_rank > 1) text += ", " + std::to_string(split.stages_per_rank) + " stages per rank";
  if (split.microbatches > 1) text += ", " + std::to_string(split.microbatches) + " microbatches";
  if (split.recompute) text += ", recomputed";
  if (!split.cuts.empty()) text += (split.cuts.size() > 1 ? ", cuts at " : ", cut at ") + joined(split.cuts);
  if (split.tensor_rule != ModelSplit().tensor_rule) text += ", " + std::string(to_string(split.tensor_rule));
  return text;
}

void check_split(const ModelSplit& split, int64_t layers) {
  const auto at_least_1 = [](const std::string& what, int64_t value) {
    if (value < 1) throw Error(what + " is " + std::to_string(value) + "; it must be at least 1", {.options = {what}});
  };
  at_least_1("mesh.data", split.mesh.data);
  at_least_1("mesh.pipeline", split.mesh.pipeline);
  at_least_1("mesh.tensor", split.mesh.tensor);
  at_least_1("stages_per_rank", split.stages_per_rank);
  at_least_1("microbatches", split.microbatches);
  if (split.stages_per_rank > 1 && split.schedule != PipelineSchedule::interleaved) {
    throw Error("stages_per_rank is " + std::to_string(split.stages_per_rank) + " and the schedule is " +
                    std::string(to_string(split.schedule)) +
                    "; only the interleaved schedule has more than 1 stage per rank",
                {.options = {"stages_per_rank", "schedule"}});
  }
  const int64_t stages = split.stages();
  const std::string which = std::to_string(split.mesh.pipeline) + " pipeline ranks with " +
                            std::to_string(split.stages_per_rank) + " stages each";
  if (stages > layers) {
    throw Error(which + " are " + std::to_string(stages) + " stages; a net of " + std::to_string(layers) +
                    " layers has at most " + std::to_string(layers),
                {.options = {"mesh"}});
  }
  if (!split.cuts.empty() && static_cast<int64_t>(split.cuts.size()) != stages - 1) {
    throw Error(which + " need " + std::to_string(stages - 1) + " cuts, and there are " +
                    std::to_string(split.cuts.size()) + ": " + text_of(split.cuts),
                {.options = {"cuts"}});
  }
  int64_t before = 0;
  for (const int64_t cut : split.cuts) {
    if (cut <= before || cut >= layers) {
      throw Error("the cuts " + text_of(split.cuts) + " are not those of a net of " + std::to_string(layers) +
                      " layers: they must ascend, from 1 to " + std::to_string(layers - 1),
                  {.options = {"cuts"}});
    }
    before = cut;
  }
}

}  // namespace lockstep
