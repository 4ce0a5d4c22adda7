#include <ATen/core/grad_mode.h>
#include <lockstep/checkpoint.hpp>
#include <lockstep/error.hpp>

#include <algorithm>
#include <sstream>
#include <utility>
#include <vector>

#include "io/safetensors.hpp"

namespace lockstep {
namespace {

using io::NamedTensors;

// Parameters, then buffers, as PyTorch's state_dict names them: a shared tensor under each of its names.
NamedTensors state_of(const torch::nn::Module& module) {
  NamedTensors state;
  for (const auto& item : module.named_parameters()) state.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) state.emplace_back(item.key(), item.value());
  return state;
}

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes();
  return text.str();
}

}  // namespace

void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata) {
  NamedTensors once;
  for (const auto& [name, tensor] : state_of(module)) {
    bool known = std::any_of(once.begin(), once.end(),
                             [&tensor = tensor](const auto& entry) { return entry.second.is_same(tensor); });
    if (!known) once.emplace_back(name, tensor);
  }
  io::write_safetensors(file, once, metadata);
}

void load_weights(const std::filesystem::path& file, torch::nn::Module& module) {
  std::map<std::string, at::Tensor> values;
  for (auto& [name, tensor] : io::read_safetensors(file)) values.emplace(name, tensor);
  auto fail = [&](const std::string& what) { throw Error("cannot load '" + file.string() + "': " + what); };

  NamedTensors state = state_of(module);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  for (const auto& [name, tensor] : state) {
    auto value = values.find(name);
    if (value == values.end()) continue;
    if (value->second.sizes() != tensor.sizes() || value->second.scalar_type() != tensor.scalar_type()) {
      fail("'" + name + "' is " + describe(value->second) + " in the file, but " + describe(tensor) + " in the module");
    }
    copies.emplace_back(tensor, value->second);
    values.erase(value);
  }
  for (const auto& [name, tensor] : state) {  // a shared tensor may be there under any of its names
    bool found = std::any_of(copies.begin(), copies.end(),
                             [&tensor = tensor](const auto& copy) { return copy.first.is_same(tensor); });
    if (!found) fail("it lacks '" + name + "', which the module has");
  }
  if (!values.empty()) fail("it holds '" + values.begin()->first + "', which the module does not have");

  at::NoGradGuard no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
}

}  // namespace lockstep
