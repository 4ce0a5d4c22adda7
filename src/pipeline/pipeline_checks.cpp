#include "pipeline_checks.hpp"

#include <ATen/ops/equal.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "base/classic.hpp"
#include "comm/arguments.hpp"
#include "nn/random_layers.hpp"
#include "ranks/equal_input.hpp"
#include "ranks/gather.hpp"

#include <algorithm>
#include <functional>

namespace lockstep {

using comm::describe;

void check_stage(const torch::nn::SequentialImpl& layers, int stage) {
  if (!has_sync_batchnorm(layers)) return;
  throw Error("Pipeline: stage " + std::to_string(stage) +
              " holds a SyncBatchNorm, which normalises over whole batches; a stage computes microbatches, and with "
              "recompute some twice. Use BatchNorm there");
}

void check_recomputable(const torch::nn::Sequential& net) {
  const std::string layer = first_random_layer(*net);
  if (layer.empty()) return;
  throw Error("SplitModel: " + layer +
              " draws random numbers, which would be others when its forward is computed again; use recompute = false, "
              "lockstep::Dropout, or p(0) for a dropout");
}

void compare_splits(Rank& rank, const ModelSplit& split) {
  const auto texts = texts_of_all_ranks(to_string(split), rank);
  const auto& mine = texts[static_cast<size_t>(rank.index())];
  for (int other = 0; other < rank.world_size(); ++other) {
    const auto& theirs = texts[static_cast<size_t>(other)];
    if (theirs == mine) continue;
    throw Error(rank.name() + ": Pipeline: the ranks differ in their splits: rank " + std::to_string(rank.index()) +
                    " has " + mine + ", rank " + std::to_string(other) + " has " + theirs,
                {Error::difference, {std::min(rank.index(), other), std::max(rank.index(), other)}});
  }
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

void check_output(int stage, const at::Tensor& y, const SampleShape& expected) {
  if (y.dim() > 0 && y.scalar_type() == expected.type && y.sizes().slice(1) == at::IntArrayRef(expected.sizes)) return;
  throw Error("Pipeline: stage " + std::to_string(stage) + " gives " + describe(y) + ", and gave " + expected.text() +
              " for zeros in eval mode; a stage's output must have one shape");
}

void check_memory(int stage, const at::Tensor& y, const SampleShape& expected) {
  constexpr std::uintptr_t kLine = 64;  // the bytes to which LibTorch aligns its memory
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(y.const_data_ptr()) % kLine == 0;
  if (y.numel() == 0 || (is_aligned && y.is_contiguous(expected.format))) return;
  throw Error("Pipeline: stage " + std::to_string(stage) +
              " gives a view of a larger tensor, or of one that lies otherwise: " + describe(y) + " with strides " +
              classic_text(y.strides()) +
              ". With a grain the cut must change no bit, and behind it these values would lie elsewhere in memory. "
              "Let the stage's last layer give a tensor of its own, as by clone(at::MemoryFormat::Contiguous), or cut "
              "elsewhere");
}

}  // namespace lockstep
