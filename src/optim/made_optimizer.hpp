// What a user's function that makes an optimizer must give.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/base/error.hpp>

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace lockstep {

// The optimizer. Throws Error, which begins with `who`, if there is none, or if its tensors are not those that the
// function was given, which are called `what`: "slices", "parameters".
inline std::unique_ptr<torch::optim::Optimizer> checked_optimizer(std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                                  const std::vector<at::Tensor>& given,
                                                                  const std::string& who, const std::string& what) {
  if (!optimizer) throw Error(who + ": the factory made no optimizer");
  std::set<const c10::TensorImpl*> left;
  for (const auto& tensor : given) left.insert(tensor.unsafeGetTensorImpl());
  size_t others = 0;
  for (const auto& group : optimizer->param_groups()) {
    for (const auto& parameter : group.params()) others += 1 - left.erase(parameter.unsafeGetTensorImpl());
  }
  if (others == 0 && left.empty()) return optimizer;
  throw Error(who + ": the factory's optimizer has " +
              (others > 0
                   ? std::to_string(others) + " tensors that are none of the " + what + " that the factory was given"
                   : std::to_string(given.size() - left.size()) + " of the " + std::to_string(given.size()) + " " +
                         what + " that the factory was given") +
              ". Make it of the factory's argument, all of it, and not of net->parameters()");
}

}  // namespace lockstep
