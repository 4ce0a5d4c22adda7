// ExchangeOptions: what the ranks of a run send each other, in the place of their gradients as they are.
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

// How the ranks' gradients become one.
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
  int64_t compress_rank = 0;  // of Compression::powersgd; 0: its default
  // If not 0, gradients are not averaged at all: each rank takes so many steps of its own and then the parameters are,
  // with an outer optimizer (local_sgd.hpp); also at the end of each epoch. With the network split by data alone.
  int64_t sync_every = 0;
  double outer_lr = 1;
  double outer_momentum = 0;
  // 1: each rank keeps and computes its slice of the optimizer; 2: and of the gradients (sharded_optimizer.hpp). Of a
  // network split by data alone, and not of lars and lamb. 0: every rank has all of it.
  int zero_stage = 0;
};

}  // namespace lockstep
