#include "split_into_stages.hpp"

#include <lockstep/base/error.hpp>

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
      throw Error("SplitModel: " + owner->second.second + " of stage " + std::to_string(owner->second.first) + " and " +
                  item.key() + " of stage " + std::to_string(stage) +
                  " are one parameter; what shares a parameter must lie in one stage");
    }
  }
}

}  // namespace

std::vector<Sequential> split_into_stages(const Sequential& net, const ModelSplit& split) {
  const auto layers = static_cast<int64_t>(net->size());
  const auto children = net->named_children();
  if (static_cast<int64_t>(children.size()) != layers) {
    throw Error("SplitModel: the net holds " + std::to_string(children.size()) + " modules, but " +
                std::to_string(layers) + " layers in a row; only layers added with push_back can be split");
  }
  std::vector<int64_t> ends = split.cuts;
  for (int stage = 0; split.cuts.empty() && stage + 1 < split.stages(); ++stage) {
    ends.push_back(part_of(layers, stage, split.stages()).end);
  }
  ends.push_back(layers);
  std::vector<Sequential> stages(ends.size());
  int64_t layer = 0;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    for (; layer < ends[stage]; ++layer) {
      stages[stage]->push_back(children[static_cast<size_t>(layer)].key(), *(net->begin() + layer));
    }
  }
  check_that_none_is_shared(stages);
  return stages;
}

}  // namespace lockstep
