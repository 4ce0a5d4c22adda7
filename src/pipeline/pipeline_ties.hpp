// PipelineTies lets a stage borrow parameters from an earlier one, as a head borrows the weight of its embedding.
//
// A parameter stays in its own stage alone, for optimizers, averages and checkpoints. A stage that borrows it computes
// with a copy. Before each batch the copy gets the owner's values. After each microbatch's backward the copy's gradient
// goes to the owner, whose backward adds both gradients before anybody sees one. So gradients have the same bits as
// without a cut. Use it on the rank's thread. A batch sends the parameter once, and each microbatch its gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include "pipeline_messages.hpp"
#include "pipeline_stage.hpp"

#include <utility>
#include <vector>

namespace lockstep {

class PipelineTies {
 public:
  // Ties the layers of this rank's stages. Call it on all ranks. Throws Error on all of them for a layer that is tied
  // to a parameter of no stage, or of a later stage alone.
  PipelineTies(std::vector<PipelineStage>& stages, Rank& rank);

  // Gives the ties of all ranks, in one order.
  const std::vector<PipelineTie>& ties() const { return ties_; }

  // Gives the copies their owners' values. Call it on all ranks.
  void refresh();

  // Makes a tensor into which a gradient of this tie fits.
  at::Tensor empty_gradient(int tie) const;

  // Gives the gradients of the stage's copies since the last call, each with its tie's number.
  std::vector<std::pair<int, at::Tensor>> take_gradients(int stage);

  // Gives the owner's parameters to which these gradients belong, each with the sum of its gradients.
  std::vector<PipelineStage::Root> roots(const std::vector<std::pair<int, at::Tensor>>& gradients) const;

 private:
  Rank rank_;
  std::vector<PipelineTie> ties_;
  std::vector<at::Tensor> parameters_;  // the owner's parameter by tie, if it is here
  std::vector<at::Tensor> copies_;      // the borrower's copy by tie, if it is here
};

}  // namespace lockstep
