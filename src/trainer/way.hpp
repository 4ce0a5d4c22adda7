// The way of a run, as its parts need it, and as flags and 0.1's config.json have it.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/trainer/way.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// "none", "bf16", "fp16", "powersgd". compression_from() throws Error that names what there is.
enum class Compression { none, bf16, fp16, powersgd };
std::string_view to_string(Compression compression);
Compression compression_from(std::string_view name);

// A value for each option that some way has. As it stands, this struct can say what no Way can.
struct FlatWay {
  Compression compress = Compression::none;
  int64_t compress_rank = 0;  // 0: PowerSgd's default
  int64_t sync_every = 0;     // 0: gradients are averaged
  double outer_lr = LocalSgdOptions().outer_lr;
  double outer_momentum = LocalSgdOptions().outer_momentum;
  int zero_stage = 0;
  bool cuda_graph = false;
  std::optional<ModelSplit> split = {};
};

FlatWay flat(const Way& way);

// The reverse. A split by data alone gives way to any other way. Throws Error for values of two ways
// (option_pairs.hpp).
Way way_of(const FlatWay& flat);

// Is the network split over the ranks by data alone, in one batch at a time?
bool by_data_alone(const ModelSplit& split);

// The way with this split in the place of its own; none: without any. Throws Error as way_of() does.
Way with_split(const Way& way, const std::optional<ModelSplit>& split);

// The hook for one rank. Null: gradients are averaged as they are.
std::shared_ptr<CommunicationHook> make_communication_hook(const Way& way, uint64_t seed);

// "gradients in bf16", "parameters every 16 steps, outer lr 0.7, outer momentum 0.9"; empty: gradients as they are.
std::string exchange_text(const Way& way);

}  // namespace lockstep
