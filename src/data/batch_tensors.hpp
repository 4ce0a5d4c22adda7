// Calls a function with each tensor of a Dataset or a Batch: x, y, and the others by their names.
#pragma once

#include <lockstep/data/data.hpp>

namespace lockstep {

// Returns a copy with change(tensor) in the place of each tensor.
template <class Tensors, class Change>
Tensors with_each_tensor(Tensors tensors, const Change& change) {
  tensors.x = change(tensors.x);
  tensors.y = change(tensors.y);
  for (auto& [name, tensor] : tensors.more) tensor = change(tensor);
  return tensors;
}

template <class Tensors, class Visit>
void each_tensor(const Tensors& tensors, const Visit& visit) {
  visit(tensors.x);
  visit(tensors.y);
  for (const auto& [name, tensor] : tensors.more) visit(tensor);
}

}  // namespace lockstep
