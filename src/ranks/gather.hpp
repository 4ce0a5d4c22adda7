// Functions that give every rank what all ranks have: numbers, texts and tensors. Checks that compare ranks use them,
// and so do checkpoints. Call each on all ranks. They throw Error as Rank's collectives do.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// Row r of the result, int64 [ranks, numbers] on the CPU, is what rank r gave. Give as many numbers on all ranks.
at::Tensor of_all_ranks(Rank& rank, const std::vector<int64_t>& numbers);

// A check makes the host wait for a GPU in so many first steps only; later the wait would cost too much.
constexpr int kChecksOnGpu = 3;

// Makes a number fit for of_all_ranks, which passes on whole numbers.
inline int64_t bits_of(double number) {
  return std::bit_cast<int64_t>(number);
}

// Gives all ranks' texts; element r is rank r's.
std::vector<std::string> texts_of_all_ranks(const std::string& text, Rank& rank);

// Gives the `text` of rank `root` on every rank.
std::string shared_text(const std::string& text, Rank& rank, int root = 0);

}  // namespace lockstep
