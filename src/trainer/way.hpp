// Gives the way of a run as the trainer needs it, and as flags and 0.1's config.json have it.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/trainer/way.hpp>

#include "option_names.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace lockstep {

enum class Compression { none, bf16, fp16, powersgd };

template <>
struct Names<Compression> {
  static constexpr auto what = "the compression of gradients";
  static constexpr std::array all{std::pair{Compression::none, "none"}, std::pair{Compression::bf16, "bf16"},
                                  std::pair{Compression::fp16, "fp16"}, std::pair{Compression::powersgd, "powersgd"}};
};

// Has a value for each option that some way has. So it can hold the options of two ways, which no Way can.
struct FlatWay {
  Compression compress = Compression::none;
  int64_t compress_rank = 0;                  // 0: PowerSgd's default
  LocalSgdOptions local = {.sync_every = 0};  // sync_every 0: gradients are averaged
  int zero_stage = 0;
  bool cuda_graph = false;
  std::optional<ModelSplit> split = {};
};

FlatWay flat(const Way& way);

// Does the reverse. A split by data alone gives way to any other way. Throws Error for values of two ways
// (option_pairs.hpp).
Way way_of(const FlatWay& flat);

// Tells whether the network is split over the ranks by data alone, in one batch at a time.
bool by_data_alone(const ModelSplit& split);

// Gives the way with this split in the place of its own, or without a split. Throws Error as way_of() does.
Way with_split(const Way& way, const std::optional<ModelSplit>& split);

// Makes the hook for one rank. Null means that gradients are averaged as they are.
std::shared_ptr<CommunicationHook> make_communication_hook(const Way& way, uint64_t seed);

}  // namespace lockstep
