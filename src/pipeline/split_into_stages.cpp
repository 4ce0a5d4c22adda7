#include <lockstep/base/error.hpp>
#include <lockstep/pipeline/pipeline.hpp>

#include "data/parts.hpp"

#include <map>
#include <string>

namespace lockstep {
namespace {

using torch::nn::Sequential;

// A parameter shared by two stages would get some of its gradient on each rank, and two values after the first step.
void check_that_none_is_shared(const std::vector<Sequential>& stages) {
  std::map<const c10::TensorImpl*, std::pair<size_t, std::string>> owners;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    for (const auto& item : stages[stage]->named_parameters()) {
      const auto [owner, is_new] = owners.try_emplace(item.value().unsafeGetTensorImpl(), stage, item.key());
      if (is_new || owner->second.first == stage) continue;
      throw Error("split_into_stages: " + owner->second.second + " of stage " + std::to_string(owner->second.first) +
                  " and " + item.key() + " of stage " + std::to_string(stage) +
                  " are one parameter; what shares a parameter must lie in one stage");
    }
  }
}

int64_t layers_of(const Sequential& net) {
  if (net.is_empty()) throw Error("split_into_stages: the net is null; build it first");
  return static_cast<int64_t>(net->size());
}

}  // namespace

std::vector<Sequential> split_into_stages(const Sequential& net, const std::vector<int64_t>& cuts) {
  const auto layers = layers_of(net);
  const auto children = net->named_children();
  if (static_cast<int64_t>(children.size()) != layers) {
    throw Error("split_into_stages: the net holds " + std::to_string(children.size()) + " modules, but " +
                std::to_string(layers) + " layers in a row; only layers added with push_back can be split");
  }
  std::vector<Sequential> stages;
  for (size_t stage = 0; stage <= cuts.size(); ++stage) {
    const int64_t begin = stage == 0 ? 0 : cuts[stage - 1];
    const int64_t end = stage == cuts.size() ? layers : cuts[stage];
    if (begin >= end || begin < 0 || end > layers) {
      throw Error("split_into_stages: stage " + std::to_string(stage) + " would hold layers " + std::to_string(begin) +
                  " to " + std::to_string(end - 1) + " of the net's " + std::to_string(layers) +
                  "; cuts must ascend from 1 to at most " + std::to_string(layers - 1) +
                  ", so that every stage has a layer");
    }
    stages.emplace_back();
    for (int64_t layer = begin; layer < end; ++layer) {
      stages.back()->push_back(children[static_cast<size_t>(layer)].key(), *(net->begin() + layer));
    }
  }
  check_that_none_is_shared(stages);
  return stages;
}

// Without this overload {2} would mean two stages.
std::vector<Sequential> split_into_stages(const Sequential& net, std::initializer_list<int64_t> cuts) {
  return split_into_stages(net, std::vector<int64_t>(cuts));
}

std::vector<Sequential> split_into_stages(const Sequential& net, int stages) {
  const auto layers = layers_of(net);
  if (stages < 1 || stages > layers) {
    throw Error("split_into_stages: " + std::to_string(stages) + " stages of a net of " + std::to_string(layers) +
                " layers; it can have 1 to " + std::to_string(layers) + " stages");
  }
  std::vector<int64_t> cuts;
  for (int stage = 1; stage < stages; ++stage) cuts.push_back(part_of(layers, stage, stages).begin);
  return split_into_stages(net, cuts);
}

}  // namespace lockstep
