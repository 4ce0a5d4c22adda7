#include <lockstep/optim/decay_groups.hpp>

#include <unordered_set>
#include <utility>

namespace lockstep {

std::vector<torch::optim::OptimizerParamGroup> decay_groups(const torch::nn::Module& module) {
  std::vector<at::Tensor> decaying, others;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : module.parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    (parameter.dim() >= 2 ? decaying : others).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(decaying));
  groups.emplace_back(std::move(others));
  return groups;
}

}  // namespace lockstep
