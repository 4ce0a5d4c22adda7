#include "twice_kept.hpp"

#include <iterator>

namespace lockstep {

std::vector<StatePiece> TwiceKept::pieces(const std::string& prefix, io::NamedTensors& tensors) const {
  auto pieces = pieces_of_state(*optimizer_.optimizer_, optimizer_.buckets_);
  for (auto& piece : pieces) piece.name = prefix + "." + piece.name;
  auto parameters = take_pieces(tensors, optimizer_.buckets_);
  pieces.insert(pieces.end(), std::make_move_iterator(parameters.begin()), std::make_move_iterator(parameters.end()));
  return pieces;
}

}  // namespace lockstep
