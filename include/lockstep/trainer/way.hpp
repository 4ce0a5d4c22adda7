// A Way says how the ranks of a run share its work. A run goes one way, which has options that no other way has.
//
//   lockstep::TrainOptions{.way = lockstep::Sharded::gradients}                              // ZeRO 2
//   lockstep::TrainOptions{.way = lockstep::SplitNetwork{{.mesh = {.pipeline = 2}}}}         // by layers
//
// They are plain values, and thread-safe.
#pragma once

#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/layout/model_split.hpp>

#include <cstdint>
#include <variant>

namespace lockstep {

// Says how gradients are rounded on their way (half_precision_hook.hpp).
enum class Rounding { none, bf16, fp16 };

// Every rank has the whole network, and all average their gradients at every step.
struct Averaged {
  Rounding rounding = Rounding::none;
};

// Does the same as Averaged, but gradients travel as products of two thin matrices (power_sgd.hpp).
struct PowerSgd {
  int64_t rank = 4;  // columns of the matrices
};

// The network is split over the ranks, as a plan says it (plan.hpp).
struct SplitNetwork {
  ModelSplit split = {};
  Rounding rounding = Rounding::none;
};

// Sharded is ZeRO 1 to 3 (data_parallel.hpp); from stage 2 on `accumulate` averages each part, so that no rank keeps
// gradients whole. With LocalSgdOptions each rank takes several steps of its own, then all average the parameters, also
// at the end of each epoch (local_sgd.hpp).
using Way = std::variant<Averaged, PowerSgd, Sharded, LocalSgdOptions, SplitNetwork>;

}  // namespace lockstep
