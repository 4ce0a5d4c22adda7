#include "sharded_state.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include <bit>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "base/classic.hpp"
#include "flat_view.hpp"
#include "optim/optimizer_state.hpp"
#include "ranks/gather.hpp"

namespace lockstep {
namespace {

using Place = ShardedBucket::Place;

using ByName = std::map<std::string, at::Tensor>;

// ---- Putting together: first all ranks learn which parameters have a state, since only ranks with a slice see that.

struct Entry {
  at::ScalarType type;
  std::optional<int64_t> number;  // the bits of a member that is one number, such as a count of steps
};
using Entries = std::map<std::string, Entry>;  // the key is the name, as in ByName

at::Tensor tensor_of(const Entry& entry) {
  return at::isFloatingType(entry.type) ? at::scalar_tensor(std::bit_cast<double>(*entry.number), entry.type)
                                        : at::scalar_tensor(*entry.number, entry.type);
}

std::string text_of(const ByName& state) {
  Classic<std::ostringstream> text;
  for (const auto& [name, value] : state) {
    const bool is_number = value.dim() == 0;
    text << static_cast<int>(value.scalar_type()) << ' ' << is_number << ' ';
    if (is_number) {
      text << (at::isFloatingType(value.scalar_type()) ? bits_of(value.item<double>()) : value.item<int64_t>()) << ' ';
    }
    text << name << '\n';
  }
  return text.str();
}

Entries entries_of_all_ranks(const ByName& mine, Rank& rank) {
  Entries entries;
  for (const auto& theirs : texts_of_all_ranks(text_of(mine), rank)) {
    Classic<std::istringstream> text(theirs);
    int type = 0;
    bool is_number = false;
    while (text >> type >> is_number) {
      Entry entry{.type = static_cast<at::ScalarType>(type), .number = {}};
      if (is_number) text >> entry.number.emplace();
      std::string name;
      std::getline(text.ignore(), name);
      entries.emplace(name, entry);
    }
  }
  return entries;
}

// Gives one member's values for a bucket. Call it on all ranks.
at::Tensor gathered(const std::string& member, at::ScalarType type, const ShardedBucket& bucket, const ByName& mine,
                    Rank& rank) {
  at::Tensor flat = at::zeros(bucket.values.sizes(), bucket.values.options().dtype(type));
  const at::Tensor slice = slice_of_flat(flat, rank);
  for (const auto& place : bucket.places) {
    const auto found = mine.find(member + "." + place.name);
    if (found != mine.end()) slice.narrow(0, place.slice.in_slice, place.slice.size).copy_(found->second);
  }
  gather_slices({{flat, slice}}, rank);
  return flat;
}

// ---- Taking apart.

// Cuts a parameter's value of a member down to this rank's slice. A step count is one number, and stays whole.
at::Tensor slice_of(const at::Tensor& value, const Place& place) {
  if (value.dim() == 0 && (place.parameter.dim() > 0 || !at::isFloatingType(value.scalar_type()))) return value;
  const at::Tensor flat = at::empty({value.numel()}, place.parameter.options().dtype(value.scalar_type()));
  view_in_flat(place.parameter, flat, 0).copy_(value);
  return flat.narrow(0, place.slice.in_parameter, place.slice.size).clone();
}

}  // namespace

io::NamedTensors whole_state(const torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                             Rank& rank) {
  const c10::NoGradGuard no_grad;
  const auto state = optimizer_state(optimizer, slices_of(buckets));
  const ByName mine(state.begin(), state.end());
  const Entries entries = entries_of_all_ranks(mine, rank);
  std::set<std::string> members;
  for (const auto& [name, entry] : entries) members.insert(parts_of_state_name(name).first);

  io::NamedTensors whole;
  for (const auto& bucket : buckets) {
    for (const auto& member : members) {
      at::Tensor flat;
      for (const auto& place : bucket.places) {
        const std::string name = member + "." + place.name;
        const auto found = entries.find(name);
        if (found == entries.end()) continue;
        const Entry& entry = found->second;
        if (!entry.number && !flat.defined()) flat = gathered(member, entry.type, bucket, mine, rank);
        whole.emplace_back(name, entry.number ? tensor_of(entry) : ShardedBucket::view(place, flat).clone());
      }
    }
  }
  return whole;
}

void load_slices_of_state(torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                          const io::NamedTensors& state) {
  const c10::NoGradGuard no_grad;
  std::map<std::string, const Place*> places;
  for (const auto& bucket : buckets) {
    for (const auto& place : bucket.places) places.emplace(place.name, &place);
  }
  io::NamedTensors mine;
  for (const auto& [name, value] : state) {
    const auto found = places.find(parts_of_state_name(name).second);
    if (found == places.end()) throw Error("the optimizer has no place for the state '" + name + "'");
    const Place& place = *found->second;
    if (value.dim() > 0 && value.sizes() != place.parameter.sizes())
      throw Error("the optimizer's state has another shape for " + name + " than the parameter");
    if (place.slice.size > 0) mine.emplace_back(name, slice_of(value, place));
  }
  load_optimizer_state(optimizer, slices_of(buckets), mine);
}

// A slice's own version changes when it takes over gathered values, also where the values stay the same.
std::vector<WatchedTensor> watched_slices(const torch::optim::Optimizer& optimizer,
                                          const std::vector<ShardedBucket>& buckets, bool with_parameters) {
  std::vector<WatchedTensor> slices;
  for (const auto& [name, value] : optimizer_state(optimizer, slices_of(buckets)))
    slices.push_back({.name = "the optimizer's " + name, .values = value});
  for (const auto& bucket : buckets) {
    for (const auto& place : bucket.places) {
      if (!with_parameters || place.slice.size == 0) continue;
      slices.push_back({place.name, place.slice.values, static_cast<int64_t>(place.parameter._version())});
    }
  }
  return slices;
}

}  // namespace lockstep
