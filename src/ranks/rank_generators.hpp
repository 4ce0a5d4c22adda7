// Generators: makes new generators, and gives the states of LibTorch's default generators, one per device, as
// checkpoints hold them. Ranks on the CPU share one.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Gives a new generator. LibTorch's CPU generator takes the seed's low 32 bits.
at::Generator generator_on(const c10::Device& device, uint64_t seed);

// Gives uint8 [ranks, bytes], whose row r is the state of rank r's device. Call it on all ranks.
at::Tensor generators_of_all_ranks(Rank& rank);

// Sets the states. Call it on all ranks. Draws that ranks made before are done when it returns.
void set_generator(Rank& rank, const at::Tensor& states);

}  // namespace lockstep
