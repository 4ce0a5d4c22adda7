#include "sharded_state.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <lockstep/error.hpp>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "optimizer_state.hpp"

namespace lockstep {
namespace {

// The slices' names are their buckets' numbers.
io::NamedTensors slices_of(const std::vector<ShardedBucket>& buckets) {
  io::NamedTensors slices;
  for (const auto& bucket : buckets) slices.emplace_back(std::to_string(slices.size()), bucket.slice);
  return slices;
}

// "exp_avg" and "fc1.weight".
std::pair<std::string, std::string> parts_of_name(const std::string& name) {
  const size_t dot = name.find('.');
  if (dot == std::string::npos) throw Error("'" + name + "' is not the name of an optimizer's state");
  return {name.substr(0, dot), name.substr(dot + 1)};
}

using ByName = std::map<std::string, at::Tensor>;

// One member's values for this rank's slice of a bucket; none if no parameter of it has that member. What counts steps
// is one number for a parameter: the most of them here, where all count alike.
std::optional<at::Tensor> slice_of_member(const ByName& by_name, const std::string& member, const ShardedBucket& bucket,
                                          const Rank& rank) {
  at::Tensor flat, number;
  for (const auto& place : bucket.places) {
    const auto found = by_name.find(member + "." + place.name);
    if (found == by_name.end()) continue;
    const at::Tensor& value = found->second;
    const bool counts = value.dim() == 0 && (place.parameter.dim() > 0 || !at::isFloatingType(value.scalar_type()));
    if (counts) {
      number = number.defined() ? number.max(value) : value;
      continue;
    }
    if (value.sizes() != place.parameter.sizes()) {
      throw Error("the optimizer's state has another shape for " + found->first + " than the parameter");
    }
    if (!flat.defined()) flat = at::zeros(bucket.values.sizes(), bucket.values.options().dtype(value.scalar_type()));
    ShardedBucket::view(place, flat).copy_(value);
  }
  if (flat.defined()) return slice_of_flat(flat, rank).clone();
  if (number.defined()) return number;
  return std::nullopt;
}

}  // namespace

io::NamedTensors whole_state(const torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                             Rank& rank) {
  const c10::NoGradGuard no_grad;
  io::NamedTensors whole;
  for (const auto& [name, value] : optimizer_state(optimizer, slices_of(buckets))) {
    const auto [member, number] = parts_of_name(name);
    const ShardedBucket& bucket = buckets[std::stoul(number)];
    const bool sliced = value.dim() > 0;
    at::Tensor flat;
    if (sliced) {
      flat = at::empty(bucket.values.sizes(), value.options());
      gather_slices({{flat, value}}, rank);
    }
    for (const auto& place : bucket.places) {
      whole.emplace_back(member + "." + place.name, sliced ? ShardedBucket::view(place, flat).clone() : value.clone());
    }
  }
  return whole;
}

void load_slices_of_state(torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                          const Rank& rank, const io::NamedTensors& state) {
  const c10::NoGradGuard no_grad;
  const ByName by_name(state.begin(), state.end());
  std::set<std::string> members, known;
  for (const auto& bucket : buckets) {
    for (const auto& place : bucket.places) known.insert(place.name);
  }
  for (const auto& [name, value] : state) {
    const auto [member, parameter] = parts_of_name(name);
    if (!known.contains(parameter)) throw Error("the optimizer has no place for the state '" + name + "'");
    members.insert(member);
  }
  io::NamedTensors mine;
  for (size_t number = 0; number < buckets.size(); ++number) {
    for (const auto& member : members) {
      const auto value = slice_of_member(by_name, member, buckets[number], rank);
      if (value) mine.emplace_back(member + "." + std::to_string(number), *value);
    }
  }
  load_optimizer_state(optimizer, slices_of(buckets), mine);
}

}  // namespace lockstep
