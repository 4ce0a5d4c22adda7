#include "grain_sums.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace lockstep {

GrainSums::GrainSums(size_t parameters, int64_t columns, const at::TensorOptions& options, View view)
    : columns_(columns), options_(options), view_(std::move(view)), parameters_(parameters) {}

at::Tensor GrainSums::new_row() const {
  return at::zeros({columns_}, options_);
}

void GrainSums::set_row(size_t number, const at::Tensor& memory) {
  if (number == rows_.size()) {
    rows_.emplace_back();
    for (auto& column : parameters_) column.rows.emplace_back();
  }
  if (rows_[number].is_same(memory)) return;
  rows_[number] = memory;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    parameters_[parameter].rows[number] = view_(parameter, memory);
  }
}

void GrainSums::begin(const Range& run, const at::Tensor& first) {
  run_ = run;
  if (!first.defined() && !own_first_.defined()) own_first_ = new_row();
  set_row(0, first.defined() ? first : own_first_);
  while (rows_.size() < most_blocks(run)) set_row(rows_.size(), new_row());
  for (auto& column : parameters_) {
    column.next = run.begin;
    column.blocks.clear();
    column.filled.clear();
    column.any = false;
  }
}

bool GrainSums::add(size_t parameter, int64_t grain, const at::Tensor& gradient) {
  const c10::AutoGradMode no_grad(false);
  Column& column = parameters_[parameter];
  if (grain < column.next) return false;
  while (column.next < grain) push(column, {});
  push(column, gradient);
  column.any = true;
  return true;
}

bool GrainSums::any(size_t parameter) const {
  return parameters_[parameter].any;
}

void GrainSums::push(Column& column, const at::Tensor& gradient) {
  auto& blocks = column.blocks;
  auto& filled = column.filled;
  const auto add_to_last = [&](const at::Tensor& values) {
    const at::Tensor& row = column.rows[blocks.size() - 1];
    if (values.defined()) filled.back() ? row.add_(values) : row.copy_(values);
    filled.back() = filled.back() || values.defined();
    blocks.back().size *= 2;
  };
  const GrainBlock leaf{.begin = column.next++, .size = 1};
  if (!blocks.empty() && are_halves(blocks.back(), leaf)) {
    add_to_last(gradient);
  } else {
    if (gradient.defined()) column.rows[blocks.size()].copy_(gradient);
    blocks.push_back(leaf);
    filled.push_back(gradient.defined());
  }
  while (blocks.size() > 1 && are_halves(blocks[blocks.size() - 2], blocks.back())) {
    const at::Tensor last = filled.back() ? column.rows[blocks.size() - 1] : at::Tensor();
    blocks.pop_back();
    filled.pop_back();
    add_to_last(last);
  }
}

std::vector<at::Tensor> GrainSums::finish() {
  const c10::AutoGradMode no_grad(false);
  for (auto& column : parameters_) {
    while (column.next < run_.end) push(column, {});
    for (size_t row = 0; row < column.blocks.size(); ++row) {
      if (!column.filled[row]) column.rows[row].fill_(-0.0);
    }
  }
  return {rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(blocks_of(run_).size())};
}

}  // namespace lockstep
