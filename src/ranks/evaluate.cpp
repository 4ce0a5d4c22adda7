#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/evaluate.hpp>

#include <algorithm>
#include <string>

namespace lockstep {
namespace {

// The last grain of a batch may be smaller; whole batches of whole grains make the data's last grain the only one.
int64_t in_whole_grains(int64_t batch_size, int64_t grain) {
  if (grain < 0)
    throw Error("evaluate: the grain is " + std::to_string(grain) + " samples; give 1 or more, or 0 for none");
  return grain == 0 || batch_size < 1 ? batch_size : (batch_size + grain - 1) / grain * grain;
}

}  // namespace

Score evaluate(const std::function<at::Tensor(const at::Tensor&)>& forward, const Dataset& dataset, Rank& rank,
               int64_t batch_size, int64_t grain) {
  const torch::NoGradGuard no_grad;
  const auto options = torch::TensorOptions().device(rank.device());
  const int64_t size = in_whole_grains(batch_size, grain);
  const at::Tensor correct = torch::zeros({}, options.dtype(torch::kLong));
  // A cell for each grain of the data, which one rank fills, so that the ranks' sum is exact; without a grain one cell.
  const int64_t cells = grain == 0 ? 1 : std::max<int64_t>(1, (dataset.size() + grain - 1) / grain);
  const at::Tensor losses = torch::zeros({cells}, options.dtype(torch::kDouble));
  const auto add = [&](const Batch& batch, int64_t cell) {
    const at::Tensor logits = forward(batch.x);
    correct.add_((logits.argmax(1) == batch.y).sum());
    losses[cell].add_(torch::nn::functional::cross_entropy(
        logits, batch.y, torch::nn::CrossEntropyLossOptions().reduction(torch::kSum)));
  };
  int64_t grains_before = 0;  // in the batches before
  for (const auto& batch : batches(dataset, {.size = size, .shuffle = false, .grain = grain}, rank)) {
    const int64_t first_cell = grains_before;
    if (grain > 0) grains_before += batch.grains();
    if (batch.size() == 0) continue;
    if (grain == 0) {
      add(batch, 0);
      continue;
    }
    const Range own = batch.own_grains();
    for (int64_t number = own.begin; number < own.end; ++number) add(batch.of_grain(number), first_cell + number);
  }
  rank.allreduce(correct);
  rank.allreduce(losses);

  Score score;
  score.total = dataset.size();
  score.correct = correct.item<int64_t>();
  const at::Tensor here = losses.cpu();
  double loss = 0;
  for (int64_t cell = 0; cell < cells; ++cell) loss += here.const_data_ptr<double>()[cell];
  score.loss = score.total == 0 ? 0.0 : loss / static_cast<double>(score.total);
  return score;
}

}  // namespace lockstep
