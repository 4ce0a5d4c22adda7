#include "pipeline_checks.hpp"

#include <ATen/ops/equal.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "pipeline_stage.hpp"
#include "ranks/equal_input.hpp"
#include "ranks/gather.hpp"

#include <functional>
#include <iterator>
#include <utility>

namespace lockstep {

using torch::nn::Sequential;

void check_stages(const std::vector<Sequential>& stages, const Rank& rank, const PipelineOptions& options) {
  const int ranks = rank.world_size();
  const auto count = static_cast<int>(stages.size());
  const bool interleaved = options.schedule == PipelineSchedule::interleaved;
  if (options.microbatches < 1) {
    throw Error("Pipeline: microbatches is " + std::to_string(options.microbatches) + "; it must be at least 1");
  }
  if (count == 0 || (interleaved ? count % ranks != 0 : count != ranks)) {
    throw Error("Pipeline: " + std::to_string(count) + " stages do not go with " + std::to_string(ranks) +
                " ranks and the schedule " + std::string(to_string(options.schedule)) + ", which takes " +
                (interleaved ? "a multiple of " : "") + std::to_string(ranks));
  }
  for (int index = rank.index(); index < count; index += ranks) {
    const auto& layers = stages[static_cast<size_t>(index)];
    if (layers.is_empty() || layers->is_empty()) {
      throw Error("Pipeline: stage " + std::to_string(index) + " is of rank " + std::to_string(rank.index()) +
                  ", and has no layers there; every rank must be given its own stages");
    }
    if (layers->named_children().size() != layers->size()) {
      throw Error("Pipeline: stage " + std::to_string(index) + " holds modules that are none of its layers");
    }
    if (has_sync_batchnorm(*layers)) {
      throw Error(
          "Pipeline: stage " + std::to_string(index) +
          " holds a SyncBatchNorm, which normalises over whole batches; a stage computes microbatches, and with "
          "recompute some twice. Use BatchNorm there");
    }
    if (options.recompute) check_recomputable(layers, "Pipeline: stage " + std::to_string(index));
  }
}

int compare_options(Rank& rank, int stages, const PipelineOptions& options, int first_here) {
  const std::pair<const char*, int64_t> entries[] = {{"stages", stages},
                                                     {"schedule", static_cast<int64_t>(options.schedule)},
                                                     {"microbatches", options.microbatches},
                                                     {"recompute", options.recompute}};
  std::vector<int64_t> numbers;
  for (const auto& [name, value] : entries) numbers.push_back(value);
  numbers.push_back(first_here);
  const at::Tensor all = of_all_ranks(rank, numbers);
  for (int other = 0; other < rank.world_size(); ++other) {
    for (size_t i = 0; i < std::size(entries); ++i) {
      const auto theirs = all[other][static_cast<int64_t>(i)].item<int64_t>();
      if (theirs == numbers[i]) continue;
      throw Error(std::string("Pipeline: the ranks differ in ") + entries[i].first + ": rank " +
                      std::to_string(rank.index()) + " has " + std::to_string(numbers[i]) + ", rank " +
                      std::to_string(other) + " has " + std::to_string(theirs),
                  {Error::difference, {std::min(rank.index(), other), std::max(rank.index(), other)}});
    }
  }
  return static_cast<int>(all.select(1, -1).min().item<int64_t>());
}

void compare_batches(Rank& rank, const std::string& shape, int64_t size) {
  const at::Tensor all = of_all_ranks(rank, {size, static_cast<int64_t>(std::hash<std::string>()(shape))});
  for (int other = 0; other < rank.world_size(); ++other) {
    const auto their_size = all[other][0].item<int64_t>();
    if (their_size == size && at::equal(all[other][1], all[rank.index()][1])) continue;
    throw Error("Pipeline: the ranks' batches differ: rank " + std::to_string(rank.index()) + " passes " +
                    std::to_string(size) + " samples of " + shape + ", rank " + std::to_string(other) + " " +
                    std::to_string(their_size) + " samples" +
                    (their_size == size ? " of another shape, type or memory format" : "") +
                    ". All ranks of a pipeline must pass the same batch",
                {Error::difference, {std::min(rank.index(), other), std::max(rank.index(), other)}});
  }
}

void compare_inputs(Rank& rank, const at::Tensor& x, int64_t inputs) {
  const auto other = rank_with_another_input(x, rank, inputs);
  if (!other) return;
  throw Error(
      rank.name() + ": Pipeline: all ranks of a pipeline must pass the same samples, and rank " +
          std::to_string(*other) +
          " passes others than rank 0, so that the first stage's x does not belong to the last one's y. Call "
          "batches(…) without the rank, or with the mesh's data axis (net.mesh().data()); a loader of your own must "
          "give all ranks of the pipeline the same batches, and what it draws at random must be drawn alike",
      {Error::difference, {0, *other}});
}

void check_mark(const Rank& rank, int32_t mark, int32_t of_last) {
  if (mark == 0 || of_last == 0 || mark == of_last) return;
  throw Error(rank.name() +
                  ": Pipeline: this rank's batch is another one than the last rank's, so the first stage's x does not "
                  "belong to the last one's y. Give batches() the same data, seed, epoch and shuffle on all ranks of a "
                  "pipeline, and take as many batches everywhere",
              {Error::difference});
}

}  // namespace lockstep
