#include "made_optimizer.hpp"

#include <lockstep/base/error.hpp>

#include <set>

#include "base/classic.hpp"

namespace lockstep {

std::vector<at::Tensor> tensors_in(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> tensors;
  for (const auto& group : groups) tensors.insert(tensors.end(), group.params().begin(), group.params().end());
  return tensors;
}

void check_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups, const io::NamedTensors& parameters,
                  const std::string& who) {
  const auto refuse = [&](const std::string& what) {
    throw Error(who + ": " + what + ". Make the groups of the module's parameters(), each parameter in one of them",
                {.options = {"groups"}});
  };
  std::set<const c10::TensorImpl*> left;
  for (const auto& [name, parameter] : parameters) {
    if (parameter.requires_grad()) left.insert(parameter.unsafeGetTensorImpl());
  }
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) {
      if (!parameter.requires_grad() || left.erase(parameter.unsafeGetTensorImpl()) > 0) continue;
      refuse("group " + std::to_string(number) + " has a parameter of shape " + classic_text(parameter.sizes()) +
             " that is none of the net's, or is in a group already");
    }
  }
  for (const auto& [name, parameter] : parameters) {
    if (left.contains(parameter.unsafeGetTensorImpl())) refuse(name + " is in none of the groups");
  }
}

std::unique_ptr<torch::optim::Optimizer> checked_optimizer(std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                           const std::vector<at::Tensor>& given, const std::string& who,
                                                           const std::string& what) {
  if (!optimizer) throw Error(who + ": the factory made no optimizer", {.options = {"optimizer"}});
  std::set<const c10::TensorImpl*> left;
  for (const auto& tensor : given) left.insert(tensor.unsafeGetTensorImpl());
  size_t others = 0;
  for (const auto& parameter : tensors_in(optimizer->param_groups())) {
    others += 1 - left.erase(parameter.unsafeGetTensorImpl());
  }
  if (others == 0 && left.empty()) return optimizer;
  throw Error(
      who + ": the factory's optimizer has " +
          (others > 0 ? std::to_string(others) + " tensors that are none of the " + what + " that the factory was given"
                      : std::to_string(given.size() - left.size()) + " of the " + std::to_string(given.size()) + " " +
                            what + " that the factory was given") +
          ". Make it of the factory's argument, all of it, and not of the module's parameters()",
      {.options = {"optimizer"}});
}

}  // namespace lockstep
