// ExchangeOptions: what the ranks of a run send each other, in the place of their gradients as they are.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

// How gradients are sent when ranks average them.
enum class Compression {
  none,      // as they are
  bf16,      // rounded, as fp16 (half_precision_hook.hpp)
  fp16,      //
  powersgd,  // as matrices of ExchangeOptions::compress_rank (power_sgd.hpp), with the network split by data alone
};

// "none", "bf16", "fp16", "powersgd". And back; throws Error that names what there is.
std::string_view to_string(Compression compression);
Compression compression_from(std::string_view name);

struct ExchangeOptions {
  Compression compress = Compression::none;
  int64_t compress_rank = 0;  // for Compression::powersgd; 0: its default
  // If not 0, gradients are not averaged. Each rank takes so many steps of its own; then the ranks average their
  // parameters, with an outer optimizer (local_sgd.hpp). They also do so at the end of each epoch. Only with the
  // network split by data alone.
  int64_t sync_every = 0;
  double outer_lr = 1;  // for this and outer_momentum see LocalSgdOptions
  double outer_momentum = 0;
  // ZeRO (Sharded in data_parallel/options.hpp). 0: every rank has the whole optimizer. 1: each rank keeps and computes
  // its slice of the optimizer. 2: and of the gradients. 3: and of the parameters. From 2 on `accumulate` averages each
  // part, so that no rank keeps gradients whole. Only with the network split by data alone, and not with lars and lamb.
  int zero_stage = 0;
};

}  // namespace lockstep
