#include "module_state.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/classic.hpp"

namespace lockstep {
namespace {

using io::NamedTensors;

NamedTensors every_name_of(const torch::nn::Module& module) {
  NamedTensors state;
  for (const auto& item : module.named_parameters()) state.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) state.emplace_back(item.key(), item.value());
  return state;
}

std::string type_and_sizes(const at::Tensor& tensor) {
  return classic_text(c10::toString(tensor.scalar_type()), ' ', tensor.sizes());
}

}  // namespace

NamedTensors state_of(const torch::nn::Module& module) {
  NamedTensors once;
  for (const auto& [name, tensor] : every_name_of(module)) {
    bool known = std::any_of(once.begin(), once.end(),
                             [&tensor = tensor](const auto& entry) { return entry.second.is_same(tensor); });
    if (!known) once.emplace_back(name, tensor);
  }
  return once;
}

UnmatchedNames load_state(const NamedTensors& from, torch::nn::Module& module, const std::string& what, bool strict) {
  std::map<std::string, at::Tensor> values(from.begin(), from.end());
  auto fail = [&](const std::string& why) { throw Error(what + ": " + why, {Error::file}); };

  NamedTensors state = every_name_of(module);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // pairs of to and from
  for (const auto& [name, tensor] : state) {
    auto value = values.find(name);
    if (value == values.end()) continue;
    if (value->second.sizes() != tensor.sizes() || value->second.scalar_type() != tensor.scalar_type()) {
      fail("'" + name + "' is " + type_and_sizes(value->second) + " in the file, but " + type_and_sizes(tensor) +
           " in the module");
    }
    copies.emplace_back(tensor, value->second);
    values.erase(value);
  }
  UnmatchedNames unmatched;
  for (const auto& [name, tensor] : state) {
    bool found = std::any_of(copies.begin(), copies.end(),
                             [&tensor = tensor](const auto& copy) { return copy.first.is_same(tensor); });
    if (!found) unmatched.missing.push_back(name);
  }
  for (const auto& [name, value] : values) unmatched.unexpected.push_back(name);
  if (strict && !unmatched.missing.empty()) {
    fail("it lacks '" + unmatched.missing.front() + "', which the module has");
  }
  if (strict && !unmatched.unexpected.empty()) {
    fail("it holds '" + unmatched.unexpected.front() + "', which the module does not have");
  }

  const at::NoGradGuard no_grad;
  for (auto& [to, value] : copies) to.copy_(value);
  return unmatched;
}

}  // namespace lockstep
