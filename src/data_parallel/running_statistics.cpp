#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/running_statistics.hpp>

#include "running_statistics_names.hpp"
#include "trained_net.hpp"

#include <string>
#include <vector>

namespace lockstep {
namespace {

// Computes in float64, in which each product and sum here is exact for float32's statistics. So statistics that are
// equal on all ranks, as SyncBatchNorm's are, stay what they are.
void average_weighted(const std::vector<at::Tensor>& statistics, Rank& rank, int64_t samples) {
  const auto type = at::TensorOptions(rank.device()).dtype(at::kDouble);
  std::vector<at::Tensor> parts{at::full({1}, static_cast<double>(samples), type)};
  for (const auto& tensor : statistics) parts.push_back(tensor.flatten().to(type) * samples);
  const at::Tensor sums = at::cat(parts);
  rank.allreduce(sums);
  const auto total = sums[0].item<double>();
  if (total == 0) return;
  int64_t offset = 1;
  for (const auto& tensor : statistics) {
    tensor.copy_(sums.narrow(0, offset, tensor.numel()).view(tensor.sizes()) / total);
    offset += tensor.numel();
  }
}

}  // namespace

void average_running_statistics(torch::nn::Module& module, Rank& rank, int64_t samples) {
  if (samples < 0) {
    throw Error(rank.name() + ": average_running_statistics: " + std::to_string(samples) +
                " samples; a rank has seen 0 or more");
  }
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> statistics, counts;
  for (const auto& buffer : module.named_buffers()) {
    const std::string name = name_of_buffer(buffer.key());
    if (name == "running_mean" || name == "running_var") statistics.push_back(buffer.value());
    if (name == "num_batches_tracked") counts.push_back(buffer.value());
  }
  if (!statistics.empty()) average_weighted(statistics, rank, samples);
  if (counts.empty()) return;
  const at::Tensor largest = at::stack(counts);
  rank.allreduce(largest, c10d::ReduceOp::MAX);
  for (size_t i = 0; i < counts.size(); ++i) counts[i].copy_(largest[static_cast<int64_t>(i)]);
}

void average_running_statistics(TrainedNet& net, int64_t samples) {
  average_running_statistics(net.replica()->module(), net.replica()->rank(), samples);
}

}  // namespace lockstep
