#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <lockstep/ranks/evaluate.hpp>

namespace lockstep {

Score evaluate(const std::function<at::Tensor(const at::Tensor&)>& forward, const Dataset& dataset, Rank& rank,
               int64_t batch_size) {
  const torch::NoGradGuard no_grad;
  const auto options = torch::TensorOptions().device(rank.device());
  const at::Tensor correct = torch::zeros({}, options.dtype(torch::kLong));
  const at::Tensor loss = torch::zeros({}, options.dtype(torch::kDouble));
  for (const auto& batch : batches(dataset, {.size = batch_size, .shuffle = false}, rank)) {
    if (batch.size() == 0) continue;
    const at::Tensor logits = forward(batch.x);
    correct.add_((logits.argmax(1) == batch.y).sum());
    loss.add_(torch::nn::functional::cross_entropy(logits, batch.y,
                                                   torch::nn::CrossEntropyLossOptions().reduction(torch::kSum)));
  }
  rank.allreduce(correct);
  rank.allreduce(loss);

  Score score;
  score.total = dataset.size();
  score.correct = correct.item<int64_t>();
  score.loss = score.total == 0 ? 0.0 : loss.item<double>() / static_cast<double>(score.total);
  return score;
}

}  // namespace lockstep
