#include "grain_exchange.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include "comm/agreed_parts.hpp"
#include "grain_tree.hpp"

#include <string>
#include <utility>

namespace lockstep {
namespace {

at::Tensor added(const std::vector<at::Tensor>& rows, const std::vector<GrainBlock>& blocks) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [into, from] : additions_of(blocks)) rows[into].add_(rows[from]);
  return rows.front();
}

}  // namespace

GrainRound post_grain_sums(Rank& rank, const at::Tensor& blocks, const std::vector<int64_t>& runs) {
  const c10::AutoGradMode no_grad(false);
  const int64_t slice = blocks.size(1) / rank.world_size();
  std::vector<GrainBlock> all;
  std::vector<at::Tensor> inputs, outputs;
  const at::Tensor nothing = at::empty({0}, blocks.options());
  for (int other = 0; other < rank.world_size(); ++other) {
    const auto theirs = blocks_of({runs[static_cast<size_t>(other)], runs[static_cast<size_t>(other) + 1]});
    all.insert(all.end(), theirs.begin(), theirs.end());
    const bool stays = other == rank.index();
    inputs.push_back(stays ? nothing : blocks.narrow(1, other * slice, slice).contiguous());
    outputs.push_back(stays ? nothing : at::empty({static_cast<int64_t>(theirs.size()), slice}, blocks.options()));
  }
  GrainRound round;
  if (rank.world_size() > 1) {
    const std::string parts =
        c10::str("grains at ", c10::IntArrayRef(runs), " in slices of ", slice, " values of ", blocks.scalar_type());
    const comm::AgreedParts agreed(parts);
    round.work = rank.backend().alltoall(outputs, inputs);
  }
  outputs[static_cast<size_t>(rank.index())] = blocks.narrow(1, rank.index() * slice, slice);
  round.sum = [all = std::move(all), outputs = std::move(outputs)] {
    std::vector<at::Tensor> rows;
    for (const auto& output : outputs) {
      for (int64_t row = 0; row < output.size(0); ++row) rows.push_back(output[row]);
    }
    return added(rows, all);
  };
  return round;
}

}  // namespace lockstep
