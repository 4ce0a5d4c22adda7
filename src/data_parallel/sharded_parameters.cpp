#include "sharded_parameters.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "flat_view.hpp"

#include <algorithm>
#include <limits>
#include <map>

namespace lockstep {
namespace {

constexpr int64_t kLine = 64;  // a line's values: two vectors of bfloat16, or more of other types

int64_t in_lines(int64_t values) {
  return (values + kLine - 1) / kLine * kLine;
}

// Gives what of a place lies in the slice of rank `number`.
ShardedBucket::Slice slice_in(const at::Tensor& slice, int64_t number, const ShardedBucket::Place& place) {
  const int64_t begin = slice.numel() * number, end = begin + slice.numel();
  const int64_t first = std::max(begin, place.offset), last = std::min(end, place.offset + place.parameter.numel());
  if (first >= last) return {};
  ShardedBucket::Slice mine{.size = last - first, .in_parameter = first - place.offset, .in_slice = first - begin};
  // variable_data: an optimizer cannot be made of a view in autograd's eyes.
  mine.values = slice.narrow(0, mine.in_slice, mine.size).variable_data();
  mine.values.requires_grad_();
  return mine;
}

void flatten(ShardedBucket& bucket, const Rank& rank, bool own_slices) {
  const c10::NoGradGuard no_grad;
  const int64_t ranks = rank.world_size(), of_each = in_lines((bucket.size + ranks - 1) / ranks);
  bucket.values = at::zeros({of_each * ranks}, bucket.places[0].parameter.options().requires_grad(false));
  for (auto& place : bucket.places) {
    const at::Tensor value = ShardedBucket::view(place, bucket.values);
    value.copy_(place.parameter);
    place.parameter.set_data(value);
  }
  bucket.slice = slice_of_flat(bucket.values, rank);
  if (own_slices) bucket.slice = bucket.slice.clone();
  for (auto& place : bucket.places) place.slice = slice_in(bucket.slice, rank.index(), place);
}

// ---- Units.

// These hold for a net whose modules are small enough, and for each rank's slice of it.
constexpr int64_t kFewestUnits = 16, kFewestOfASlice = 8;

std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

bool is_within(const std::string& module, const std::string& unit) {
  return module == unit || module.starts_with(unit + ".");
}

void check_units(const NamedParameters& parameters, const std::vector<std::string>& units, const Rank& rank) {
  const auto refuse = [&](const std::string& unit, const std::string& why) {
    throw Error(rank.name() + ": DataParallel: DataParallelOptions::units has '" + unit + "', which " + why +
                ". Give names of modules as named_modules() has them, each once");
  };
  for (size_t i = 0; i < units.size(); ++i) {
    bool found = false;
    for (const auto& [name, parameter] : parameters) found = found || is_within(module_of(name), units[i]);
    if (!found) refuse(units[i], "is no module that has parameters that need a gradient");
    for (size_t other = 0; other < units.size(); ++other) {
      if (other != i && is_within(units[i], units[other])) refuse(units[i], "is in '" + units[other] + "' already");
    }
  }
}

// Gives the named unit that has the module; empty: none.
std::string named_unit_of(const std::string& module, const std::vector<std::string>& units) {
  for (const auto& unit : units) {
    if (is_within(module, unit)) return unit;
  }
  return "";
}

int64_t bytes_of(const NamedParameters& parameters) {
  int64_t bytes = 0;
  for (const auto& [name, parameter] : parameters) bytes += static_cast<int64_t>(parameter.nbytes());
  return bytes;
}

// A rank has two or three units whole at once. So units must be small beside its slice, also where the net is small.
int64_t most_bytes(const NamedParameters& parameters, const DataParallelOptions& options, const Rank& rank) {
  const int64_t units = std::max(kFewestUnits, kFewestOfASlice * rank.world_size());
  return std::min(options.bucket_bytes, std::max(bytes_of(parameters) / units, kLeastUnitBytes));
}

// Gives the parameters that each module has itself.
std::vector<NamedParameters> in_modules(const NamedParameters& parameters) {
  std::vector<NamedParameters> modules;
  for (const auto& parameter : parameters) {
    const bool same = !modules.empty() && module_of(modules.back()[0].first) == module_of(parameter.first);
    if (!same) modules.emplace_back();
    modules.back().push_back(parameter);
  }
  return modules;
}

}  // namespace

at::Tensor ShardedBucket::view(const Place& place, const at::Tensor& flat) {
  return view_in_flat(place.parameter, flat, place.offset);
}

std::vector<ShardedBucket> shard_parameters(const NamedParameters& parameters, const Rank& rank, int64_t bucket_bytes,
                                            bool own_slices) {
  std::vector<ShardedBucket> buckets;
  std::map<at::ScalarType, ShardedBucket> filling;
  for (size_t i = parameters.size(); i-- > 0;) {
    const auto& [name, parameter] = parameters[i];
    const auto type = parameter.scalar_type();
    ShardedBucket& bucket = filling[type];
    bucket.places.push_back({.name = name, .parameter = parameter, .offset = bucket.size});
    bucket.size += in_lines(parameter.numel());
    if (bucket.size * static_cast<int64_t>(parameter.element_size()) < bucket_bytes) continue;
    buckets.push_back(std::move(bucket));
    filling.erase(type);
  }
  for (auto& [type, bucket] : filling) buckets.push_back(std::move(bucket));
  for (auto& bucket : buckets) flatten(bucket, rank, own_slices);
  return buckets;
}

std::vector<NamedParameters> units_of(const NamedParameters& parameters, const DataParallelOptions& options,
                                      const Rank& rank) {
  check_units(parameters, options.units, rank);
  const int64_t most = most_bytes(parameters, options, rank);
  std::vector<NamedParameters> units;
  std::string last_unit;
  int64_t bytes = 0;  // the last unit's bytes
  for (const auto& module : in_modules(parameters)) {
    const std::string unit = named_unit_of(module_of(module[0].first), options.units);
    const int64_t more = bytes_of(module);
    const bool full = unit.empty() && bytes + more > most && bytes >= std::min(most, kLeastUnitBytes);
    if (units.empty() || unit != last_unit || full) {
      units.emplace_back();
      bytes = 0;
    }
    units.back().insert(units.back().end(), module.begin(), module.end());
    bytes += more;
    last_unit = unit;
  }
  return units;
}

std::vector<ShardedBucket> shard_in_units(const NamedParameters& parameters, const DataParallelOptions& options,
                                          const Rank& rank) {
  std::vector<ShardedBucket> buckets;
  const auto units = units_of(parameters, options, rank);
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
    for (auto& bucket : shard_parameters(*unit, rank, std::numeric_limits<int64_t>::max(), /*own_slices=*/true)) {
      buckets.push_back(std::move(bucket));
    }
  }
  return buckets;
}

NamedParameters slices_of(const std::vector<ShardedBucket>& buckets) {
  NamedParameters slices;
  for (const auto& bucket : buckets) {
    for (const auto& place : bucket.places) {
      if (place.slice.size > 0) slices.emplace_back(place.name, place.slice.values);
    }
  }
  return slices;
}

at::Tensor slice_of_flat(const at::Tensor& flat, const Rank& rank) {
  const int64_t of_each = flat.numel() / rank.world_size();
  return flat.narrow(0, of_each * rank.index(), of_each);
}

void gather_slices(const std::vector<std::pair<at::Tensor, at::Tensor>>& flats_and_slices, Rank& rank) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const auto& [flat, slice] : flats_and_slices) {
    at::Tensor all = flat, mine = slice;
    works.push_back(rank.backend()._allgather_base(all, mine, c10d::AllgatherOptions{}));
  }
  for (const auto& work : works) work->wait();
}

}  // namespace lockstep
