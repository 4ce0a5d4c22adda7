// PipelineStage has consecutive layers, and keeps what their backward needs for each microbatch under way.
//
// Use it on the rank's thread. A stage knows nothing of the others, except whether it is the first.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

class PipelineStage {
 public:
  // Computes something from the layers' output before it leaves the stage: the last stage's head gives the loss. An
  // empty one computes nothing.
  using Head = std::function<at::Tensor(const at::Tensor& output)>;

  // `index` is 0 for the first of all stages, which needs no gradient of its input.
  PipelineStage(int index, torch::nn::Sequential layers);

  // After false, backward gives zeros for the input's gradient, since no stage before has parameters.
  void set_needs_input_gradient(bool needs) { needs_input_gradient_ = needs; }

  int index() const { return index_; }
  const torch::nn::Sequential& layers() const { return layers_; }

  // Runs the layers one after the other. Throws Error, which has a failing layer's name, input and error.
  at::Tensor through(at::Tensor x);

  // Returns head(through(x)), detached. Keeps what backward(microbatch) needs: the graph, or without `keep_graph` the
  // input alone. A layer that works in place may change `x`.
  at::Tensor forward(int microbatch, const at::Tensor& x, const Head& head, bool keep_graph);

  // Holds a parameter that another stage borrows, and the gradient that this stage's layers do not give.
  struct Root {
    at::Tensor tensor, gradient;
  };

  // Takes the gradient of forward's result, adds the parameters' gradients to their .grad, and returns the input's
  // gradient; undefined for the first stage. The last stage takes the `weight` of its loss in place of `gradient`.
  // Without the graph it computes forward again; buffers (running statistics) have moved before and keep their values.
  // A parameter of `lent` gets the gradient there in one sum with its own. Throws Error for a loss without a graph.
  at::Tensor backward(int microbatch, const at::Tensor& gradient, double weight, const std::vector<Root>& lent = {});

 private:
  at::Tensor result_of(const Head& head, at::Tensor x);
  void refuse_loss_without_graph() const;

  struct Kept {
    at::Tensor input;   // the input, a leaf
    at::Tensor output;  // the output with its graph; undefined if only the input is kept
    Head head;          // the head, for computing forward again
  };

  const int index_;
  bool needs_input_gradient_;
  torch::nn::Sequential layers_;
  std::vector<std::string> names_;
  std::map<int, Kept> kept_;  // kept tensors by microbatch
};

}  // namespace lockstep
