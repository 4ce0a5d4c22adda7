#include "averaged_gradients.hpp"

#include "data_parallel/averaging.hpp"
#include "ranks/trained_parameters.hpp"

namespace lockstep {

AveragedGradients averaged_gradients_of(Replica& replica) {
  auto* const averaging = replica.averaging();
  if (averaging != nullptr && averaging->in_slices()) return {averaging->slices(), /*in_slices=*/true};
  AveragedGradients gradients;
  for (const auto& [name, parameter] : parameters_of(replica.module())) {
    if (parameter.grad().defined()) gradients.pieces.emplace_back(name, parameter.grad());
  }
  return gradients;
}

}  // namespace lockstep
