#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "shard.hpp"
#include "sliced_dimensions.hpp"

#include <map>
#include <string>

namespace lockstep {
namespace {

using at::Tensor;
using DictOfTensors = torch::OrderedDict<std::string, Tensor>;

// Goes through the tensors in an order that is the same on all ranks.
void join_into(DictOfTensors theirs, const DictOfTensors& mine, const torch::nn::Sequential& sharded, Rank& rank) {
  const auto dimensions = sliced_dimensions_of(sharded);
  for (auto& item : theirs) {
    Tensor& whole = item.value();
    const Tensor* part = mine.find(item.key());
    if (part == nullptr) {
      throw Error("unshard: the net has a tensor " + item.key() +
                  ", which the sharded one has not; give the net that was sharded, or one like it");
    }
    const auto dim = dimensions.find(item.key());
    const Tensor joined =
        dim == dimensions.end() ? *part : joined_slices(*part, dim->second, rank, whole.size(dim->second.dim));
    if (whole.sizes() != joined.sizes()) {
      throw Error("unshard: a tensor of the net is " + classic_text(whole.sizes()) + ", the sharded one is " +
                  classic_text(joined.sizes()) + "; give the net that was sharded, or one like it");
    }
    whole.copy_(joined);
  }
}

}  // namespace

std::map<std::string, SlicedDimension> sliced_dimensions_of(const torch::nn::Sequential& sharded) {
  std::map<std::string, SlicedDimension> dimensions;
  for (const auto& item : sharded->named_modules()) {
    const auto* sliced = dynamic_cast<const Sliced*>(item.value().get());
    if (sliced == nullptr) continue;
    for (const auto& [name, how] : sliced->sliced_dimensions()) dimensions[item.key() + "." + name] = how;
  }
  return dimensions;
}

Tensor slice_of_whole(const Tensor& whole, const SlicedDimension& how, int64_t begin, int64_t size) {
  if (how.blocks == 1) return whole.narrow(how.dim, begin, size);
  return whole.unflatten(how.dim, {how.blocks, -1}).narrow(how.dim + 1, begin, size).flatten(how.dim, how.dim + 1);
}

Tensor joined_slices(const Tensor& slice, const SlicedDimension& how, Rank& rank, int64_t total) {
  if (how.blocks == 1) return gather_from_group(slice, how.dim, rank, total);
  const Tensor in_blocks = slice.unflatten(how.dim, {how.blocks, -1});
  return gather_from_group(in_blocks, how.dim + 1, rank, total / how.blocks).flatten(how.dim, how.dim + 1);
}

void unshard(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net) {
  const c10::AutoGradMode no_grad(false);
  join_into(net->named_parameters(), sharded->named_parameters(), sharded, rank);
  join_into(net->named_buffers(), sharded->named_buffers(), sharded, rank);
}

}  // namespace lockstep
