// These functions are about LibTorch's default generators, one per device. Ranks on the CPU share one, so draws of
// several ranks from there come in another order in each run.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <string>

namespace lockstep {

// Gives a new generator. LibTorch's CPU generator takes the seed's low 32 bits.
at::Generator generator_on(const c10::Device& device, uint64_t seed);

// Gives uint8 [ranks, bytes], as checkpoints hold it: row r is the state of rank r's device. Call it on all ranks.
at::Tensor generators_of_all_ranks(Rank& rank);

// Sets the states. Call it on all ranks. Draws that ranks made before are done when it returns.
void set_generator(Rank& rank, const at::Tensor& states);

uint64_t shared_seed();  // gives the seed of LibTorch's CPU generator, as it is now

// Accepts the seed as it is now, without a warning.
void keep_shared_seed(const Rank& rank);

// Warns, once in a run, if the threads share LibTorch's CPU generator and one has set the seed outside of in_turn().
void warn_of_shared_seed(const Rank& rank);

// Warns likewise of `layer` of `owner`, which draws from that generator. Does nothing if `layer` is empty.
void warn_of_shared_draws(const Rank& rank, const std::string& owner, const std::string& layer);

}  // namespace lockstep
