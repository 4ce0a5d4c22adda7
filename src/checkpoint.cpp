#include <torch/optim/optimizer.h>
#include <lockstep/checkpoint.hpp>
#include <lockstep/error.hpp>
#include <lockstep/sharded_optimizer.hpp>

#include "averaging.hpp"
#include "io/safetensors.hpp"
#include "module_state.hpp"
#include "optimizer_state.hpp"

#include <set>

namespace lockstep {
namespace {

void write_with_digest(const std::filesystem::path& file, const io::NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  io::NamedTensors here;
  for (const auto& [name, tensor] : tensors) here.emplace_back(name, tensor.detach().cpu().contiguous());
  std::map<std::string, std::string> texts = metadata;
  texts.emplace("format", "pt");
  texts.erase(io::kDigestKey);
  texts.emplace(io::kDigestKey, io::digest_of(texts, here));
  io::write_safetensors(file, here, texts);
}

std::string cannot_load(const std::filesystem::path& file) {
  return "cannot load '" + file.string() + "'";
}

io::NamedTensors read_and_check_digest(const std::filesystem::path& file) {
  std::map<std::string, std::string> metadata;
  io::NamedTensors tensors = io::read_safetensors(file, &metadata);
  try {
    io::check_digest(metadata, tensors);
  } catch (const Error& error) {
    throw Error(cannot_load(file) + ": " + error.what() + "; take another copy, or train anew");
  }
  return tensors;
}

// A tensor that the module holds under two names once, under the first.
io::NamedTensors parameters_of(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  std::set<const c10::TensorImpl*> known;
  io::NamedTensors parameters;
  for (const auto& item : module.named_parameters()) {
    if (known.insert(item.value().unsafeGetTensorImpl()).second) parameters.emplace_back(item.key(), item.value());
  }
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (known.contains(parameter.unsafeGetTensorImpl())) continue;
      throw Error("the optimizer has a parameter of shape " + c10::str(parameter.sizes()) +
                  " that is none of this module's; give the module whose parameters() it was made of");
    }
  }
  return parameters;
}

template <class Load>
void load_from(const std::filesystem::path& file, const Load& load) {
  const io::NamedTensors state = read_and_check_digest(file);
  try {
    load(state);
  } catch (const Error& error) {
    throw Error(cannot_load(file) + ": " + error.what());
  }
}

}  // namespace

void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata) {
  write_with_digest(file, state_of(module), metadata);
}

void load_weights(const std::filesystem::path& file, torch::nn::Module& module) {
  load_state(read_and_check_digest(file), module, cannot_load(file));
}

void save_optimizer(const std::filesystem::path& file, const torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module) {
  write_with_digest(file, optimizer_state(optimizer, parameters_of(module, optimizer)), {});
}

void load_optimizer(const std::filesystem::path& file, torch::optim::Optimizer& optimizer,
                    const torch::nn::Module& module) {
  load_from(file, [&](const io::NamedTensors& state) {
    load_optimizer_state(optimizer, parameters_of(module, optimizer), state);
  });
}

void save_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer) {
  const io::NamedTensors state = optimizer.state();
  if (rank_of(*optimizer.replica()).index() == 0) write_with_digest(file, state, {});
}

void load_optimizer(const std::filesystem::path& file, ShardedOptimizer& optimizer) {
  load_from(file, [&](const io::NamedTensors& state) { optimizer.load_state(state); });
}

}  // namespace lockstep
