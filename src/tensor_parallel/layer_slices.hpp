// These functions help layers in slices: they copy a whole layer's tensors, and word errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <string>

namespace lockstep {

inline const std::string kOrKeepWhole =
    "; or keep the layer whole, in a Shardable module that gives whole_copy() (parallel_layers.hpp)";

inline std::string ranks_text(int count) {
  return std::to_string(count) + " ranks";
}

// Gives "1, 2, 4".
inline std::string divisors_of(int64_t number) {
  std::string list;
  for (int64_t divisor = 1; divisor < number; ++divisor) {
    if (number % divisor == 0) list += std::to_string(divisor) + ", ";
  }
  return list + std::to_string(number);
}

// Copies a parameter that every rank holds whole; undefined stays undefined.
inline at::Tensor copy_for(const Rank& rank, const at::Tensor& whole) {
  return whole.defined() ? whole.detach().to(rank.device(), whole.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
                         : at::Tensor();
}

inline bool is_trained(const at::Tensor& parameter) {
  return parameter.defined() && parameter.requires_grad();
}

}  // namespace lockstep
