#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/nn/layer_holder.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

namespace lockstep {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

// Gives a SyncBatchNorm to replace `module`, if that is a BatchNorm of exactly this type; else nothing.
template <class BatchNorm>
std::shared_ptr<SyncBatchNormImpl> in_place_of_one(const Module& module, Rank& rank) {
  if (typeid(module) != typeid(BatchNorm)) return nullptr;
  return std::make_shared<SyncBatchNormImpl>(static_cast<const BatchNorm&>(module), rank);
}

std::shared_ptr<SyncBatchNormImpl> in_place_of(const Module& module, Rank& rank) {
  if (auto sync = in_place_of_one<torch::nn::BatchNorm1dImpl>(module, rank)) return sync;
  if (auto sync = in_place_of_one<torch::nn::BatchNorm2dImpl>(module, rank)) return sync;
  return in_place_of_one<torch::nn::BatchNorm3dImpl>(module, rank);
}

template <class... BatchNorms>
bool is_any_of(const Module& module) {
  return ((dynamic_cast<const BatchNorms*>(&module) != nullptr) || ...);
}

bool is_batch_norm(const Module& module) {
  return is_any_of<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>(module);
}

struct NormPlace {
  Module& parent;
  std::string name;  // the BatchNorm's name in its parent
  std::shared_ptr<Module> norm;
  std::shared_ptr<SyncBatchNormImpl> sync;  // the layer in its place
};

[[noreturn]] void refuse_to_convert(const std::string& path, const Module& norm) {
  throw Error(
      "convert_sync_batchnorm: " + (path.empty() ? "the module itself" : path) + " is a " +
      c10::demangle(typeid(norm).name()) +
      " that cannot be replaced: only a BatchNorm1d, 2d or 3d that is a layer of a torch::nn::Sequential, or of "
      "a lockstep::LayerHolder, can, for other modules keep theirs in members of one type. Build a "
      "lockstep::SyncBatchNorm in its place");
}

void find_places(Module& parent, const std::string& path, Rank& rank, std::vector<NormPlace>& places) {
  const bool can_replace = is_any_of<torch::nn::SequentialImpl, LayerHolder>(parent);
  for (const auto& child : parent.named_children()) {
    const std::string its_path = path.empty() ? child.key() : path + "." + child.key();
    Module& module = *child.value();
    if (!is_batch_norm(module)) {
      find_places(module, its_path, rank, places);
      continue;
    }
    const auto sync = can_replace ? in_place_of(module, rank) : nullptr;
    if (!sync) refuse_to_convert(its_path, module);
    places.push_back({parent, child.key(), child.value(), sync});
  }
}

void replace(const NormPlace& place) {
  if (auto* const holder = dynamic_cast<LayerHolder*>(&place.parent)) {
    holder->layer(place.name) = AnyModule(place.sync);
  } else {
    for (auto& layer : dynamic_cast<torch::nn::SequentialImpl&>(place.parent)) {
      if (layer.ptr() == place.norm) layer = AnyModule(place.sync);
    }
  }
  place.parent.replace_module(place.name, place.sync);
}

}  // namespace

int64_t convert_sync_batchnorm(Module& module, Rank& rank) {
  if (is_batch_norm(module)) refuse_to_convert("", module);
  Rank group = rank.group(0);
  std::vector<NormPlace> places;
  find_places(module, "", group, places);
  for (const auto& place : places) replace(place);
  return static_cast<int64_t>(places.size());
}

bool has_sync_batchnorm(const Module& module) {
  const auto modules = module.modules(/*include_self=*/false);
  const auto is_sync = [](const auto& inner) { return dynamic_cast<const SyncBatchNormImpl*>(inner.get()) != nullptr; };
  return dynamic_cast<const SyncBatchNormImpl*>(&module) != nullptr ||
         std::any_of(modules.begin(), modules.end(), is_sync);
}

}  // namespace lockstep
