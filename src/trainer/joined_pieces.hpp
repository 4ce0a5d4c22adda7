// Puts whole tensors together of the pieces that ranks have of them.
#pragma once

#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include <vector>

#include "data_parallel/state_piece.hpp"
#include "io/safetensors.hpp"

namespace lockstep {

// No rank has a part of the run's state, so it cannot go on. Thrown on all ranks at once.
class StateLost : public Error {
 public:
  using Error::Error;
};

// The tensors of all ranks' pieces, whole, on every rank, with the strides that the pieces tell. Pieces may overlap:
// the first rank that has a value gives it. All ranks must call it. Throws StateLost where no rank has a value. Cost: a
// broadcast for each rank that gives something, and the memory of the whole tensors.
io::NamedTensors joined_pieces(const std::vector<StatePiece>& mine, Rank& rank);

}  // namespace lockstep
