// GraphSkip: lets a CUDA graph leave out a step that is not finite. The graph puts back what the step has changed, but
// for the update, which looks at the mark itself (Update::skip_where).
//
// Use it from the rank's thread, while the step is recorded.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace lockstep {

class GraphSkip {
 public:
  // `mark` is FiniteWatch::found(), and `loss` the sum of losses.
  GraphSkip(at::Tensor mark, at::Tensor loss);

  // Call begin() before the step, with the tensors that change, and end() behind FiniteWatch::mark().
  void begin(std::vector<at::Tensor> tensors);
  void end();

  const at::Tensor& bad_loss() const {
    return bad_loss_;
  }  // gives the sum of losses in the last step that was left out

 private:
  const at::Tensor mark_, loss_, bad_loss_;
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // tensors, and their values before the step
};

}  // namespace lockstep
