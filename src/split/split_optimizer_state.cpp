#include "split_optimizer_state.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/classic.hpp"
#include "optim/optimizer_state.hpp"
#include "ranks/gather.hpp"
#include "tensor_parallel/shard.hpp"

namespace lockstep {
namespace {

using nlohmann::json;
using ByName = std::map<std::string, torch::Tensor>;

bool is_whole(const Mesh& mesh) {
  return mesh.shape().size() == mesh.shape().data;
}

io::NamedTensors stage_parameters(const torch::nn::Sequential& net) {
  io::NamedTensors parameters;
  for (const auto& item : net->named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

// Says where this rank's slice of a parameter lies in the whole one, or in each of its blocks, along the split
// dimension.
struct Slice {
  SlicedDimension how;
  int64_t begin, size, whole;
};
using Slices = std::map<std::string, Slice>;  // slices by the parameter's name; none for one that the rank holds whole

// Call it on all ranks of the tensor axis.
Slices slices_of(const torch::nn::Sequential& layers, Rank& group, const ByName& parameters) {
  Slices slices;
  std::vector<int64_t> sizes;
  for (const auto& [name, how] : sliced_dimensions_of(layers)) {
    const auto parameter = parameters.find(name);
    if (parameter == parameters.end()) continue;  // it is a buffer
    sizes.push_back(parameter->second.size(how.dim) / how.blocks);
    slices[name] = {how, 0, sizes.back(), 0};
  }
  if (sizes.empty()) return slices;
  const torch::Tensor table = of_all_ranks(group, sizes);
  int64_t column = 0;
  for (auto& [name, slice] : slices) {
    const torch::Tensor of_ranks = table.select(1, column++);
    slice.begin = of_ranks.narrow(0, 0, group.index()).sum().item<int64_t>();
    slice.whole = of_ranks.sum().item<int64_t>() * slice.how.blocks;
  }
  return slices;
}

// Makes the slices in `state` whole. A state without dimensions is a number of the parameter, equal on all ranks.
void join_slices(io::NamedTensors& state, const torch::nn::Sequential& layers, Rank& group, const ByName& parameters) {
  const Slices slices = slices_of(layers, group, parameters);
  for (auto& [name, tensor] : state) {
    const auto slice = slices.find(parts_of_state_name(name).second);
    if (slice == slices.end() || tensor.dim() == 0) continue;
    const auto sizes = parameters.at(slice->first).sizes();
    if (tensor.sizes() != sizes) {
      throw Error(classic_text("the optimizer's state '", name, "' has the shape ", tensor.sizes(), " on ",
                               group.name(), ", and the parameter's slice ", sizes,
                               ", so it cannot be gathered; split the network by data or layers, or train without "
                               "checkpoints"));
    }
    tensor = joined_slices(tensor, slice->second.how, group, slice->second.whole);
  }
}

// Gives every rank of the pipeline axis the states of all stages, on the CPU.
io::NamedTensors of_all_stages(const io::NamedTensors& mine, Rank& pipeline) {
  json list = json::array();
  for (const auto& [name, tensor] : mine) {
    list.push_back({{"name", name}, {"type", static_cast<int>(tensor.scalar_type())}, {"sizes", tensor.sizes().vec()}});
  }
  io::NamedTensors all;
  const auto lists = texts_of_all_ranks(list.dump(), pipeline);
  for (int owner = 0; owner < pipeline.world_size(); ++owner) {
    size_t index = 0;
    for (const json& entry : json::parse(lists[owner])) {
      const auto options =
          torch::TensorOptions(pipeline.device()).dtype(static_cast<torch::ScalarType>(entry.at("type").get<int>()));
      const torch::Tensor tensor = owner == pipeline.index()
                                       ? mine[index++].second.to(pipeline.device())
                                       : at::empty(entry.at("sizes").get<std::vector<int64_t>>(), options);
      pipeline.broadcast(tensor, owner);
      all.emplace_back(entry.at("name").get<std::string>(), tensor.cpu());
    }
  }
  return all;
}

// Each rank holds some parameters only, so a state that belongs to none of them may still have a place elsewhere.
void check_known(const io::NamedTensors& state, const io::NamedTensors& parameters, Rank& pipeline) {
  json mine = json::array();
  for (const auto& [name, parameter] : parameters) mine.push_back(name);
  std::set<std::string> known;
  for (const auto& text : texts_of_all_ranks(mine.dump(), pipeline)) {
    for (const json& name : json::parse(text)) known.insert(name.get<std::string>());
  }
  for (const auto& [name, tensor] : state) {
    if (!known.contains(parts_of_state_name(name).second))
      throw Error("the optimizer has no place for the state '" + name + "'");
  }
}

torch::Tensor slice_of(const std::string& name, const torch::Tensor& whole, const Slice& slice) {
  const int64_t dim = slice.how.dim;
  if (dim >= whole.dim() || whole.size(dim) != slice.whole) {
    throw Error(classic_text("the state '", name, "' has the shape ", whole.sizes(), ", and the parameter ",
                             slice.whole, " values along dimension ", dim));
  }
  return slice_of_whole(whole, slice.how, slice.begin, slice.size);
}

}  // namespace

io::NamedTensors joined_state(io::NamedTensors state, const torch::nn::Sequential& layers, Mesh& mesh) {
  if (is_whole(mesh)) return state;
  const torch::NoGradGuard no_grad;
  const io::NamedTensors parameters = stage_parameters(layers);
  join_slices(state, layers, mesh.tensor(), {parameters.begin(), parameters.end()});
  return of_all_stages(state, mesh.pipeline());
}

io::NamedTensors held_state(io::NamedTensors state, const torch::nn::Sequential& layers, Mesh& mesh) {
  if (is_whole(mesh)) return state;
  const torch::NoGradGuard no_grad;
  const io::NamedTensors parameters = stage_parameters(layers);
  check_known(state, parameters, mesh.pipeline());
  const ByName held(parameters.begin(), parameters.end());
  const Slices slices = slices_of(layers, mesh.tensor(), held);
  io::NamedTensors mine;
  for (const auto& [name, tensor] : state) {
    const std::string parameter = parts_of_state_name(name).second;
    if (!held.contains(parameter)) continue;
    const auto slice = slices.find(parameter);
    const bool is_sliced = slice != slices.end() && tensor.dim() > 0;
    mine.emplace_back(name, is_sliced ? slice_of(name, tensor, slice->second) : tensor);
  }
  return mine;
}

}  // namespace lockstep
