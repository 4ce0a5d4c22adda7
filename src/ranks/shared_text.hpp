// A text that one rank has and all ranks need.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <string>

namespace lockstep {

at::Tensor bytes_of_text(const std::string& text);   // uint8, one dimension, on the CPU
std::string text_of_bytes(const at::Tensor& bytes);  // on any device

// The `text` of rank `root`, on every rank. Collective. Throws Error as Rank::broadcast.
std::string shared_text(const std::string& text, Rank& rank, int root = 0);

}  // namespace lockstep
