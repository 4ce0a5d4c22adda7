#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/tensor_parallel/tensor_parallel.hpp>

#include "base/classic.hpp"
#include "sliced_dimensions.hpp"

#include <functional>
#include <map>
#include <string>

namespace lockstep {
namespace {

using at::Tensor;
using DictOfTensors = torch::OrderedDict<std::string, Tensor>;

// Calls copy(theirs, mine, join) for every tensor of the net, in an order that is the same on all ranks. join(tensor)
// joins the ranks' `tensor`s into a whole one.
using Copy = std::function<void(Tensor& whole, const Tensor& part, const std::function<Tensor(const Tensor&)>& join)>;

void for_each_tensor(const torch::nn::Sequential& sharded, Rank& rank, DictOfTensors theirs, const DictOfTensors& mine,
                     const Copy& copy) {
  const auto dimensions = sliced_dimensions_of(sharded);
  for (auto& item : theirs) {
    const Tensor* part = mine.find(item.key());
    if (part == nullptr) {
      throw Error("unshard: the net has a tensor " + item.key() +
                  ", which the sharded one has not; give the net that was sharded, or one like it");
    }
    const auto dim = dimensions.find(item.key());
    const auto join = [&](const Tensor& tensor) {
      if (dim == dimensions.end()) return tensor;
      return joined_slices(tensor, dim->second, rank, item.value().size(dim->second.dim));
    };
    copy(item.value(), *part, join);
  }
}

void check_shape(const std::string& what, const Tensor& whole, const Tensor& from) {
  if (whole.sizes() == from.sizes()) return;
  throw Error("unshard: a tensor of the net is " + classic_text(whole.sizes()) + ", the sharded " + what + " is " +
              classic_text(from.sizes()) + "; give the net that was sharded, or one like it");
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
  const auto copy = [](Tensor& whole, const Tensor& part, const auto& join) {
    const Tensor joined = join(part);
    check_shape("one", whole, joined);
    whole.copy_(joined);
  };
  for_each_tensor(sharded, rank, net->named_parameters(), sharded->named_parameters(), copy);
  for_each_tensor(sharded, rank, net->named_buffers(), sharded->named_buffers(), copy);
}

void unshard_gradients(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net) {
  const c10::AutoGradMode no_grad(false);
  const auto copy = [](Tensor& whole, const Tensor& part, const auto& join) {
    if (!part.grad().defined()) {
      whole.mutable_grad() = Tensor();
      return;
    }
    const Tensor joined = join(part.grad());
    check_shape("gradient", whole, joined);
    whole.mutable_grad() = joined.to(whole.device(), whole.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  };
  for_each_tensor(sharded, rank, net->named_parameters(), sharded->named_parameters(), copy);
}

}  // namespace lockstep
