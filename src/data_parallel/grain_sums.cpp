#include "grain_sums.hpp"

#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "comm/reduction.hpp"

#include <utility>

namespace lockstep {
namespace {

int64_t memory_of(const std::vector<GradientFactors>& factors) {  // in values
  int64_t values = 0;
  for (const auto& [grad, x] : factors) values += grad.numel() + x.numel();
  return values;
}

}  // namespace

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
    column.sums.clear();
    column.any = false;
  }
}

bool GrainSums::add(size_t parameter, int64_t grain, const at::Tensor& gradient) {
  return add_sum(parameter, grain, {.value = gradient});
}

bool GrainSums::add(size_t parameter, int64_t grain, const GradientFactors& factors) {
  return add_sum(parameter, grain, {.factors = {factors}});
}

bool GrainSums::takes(size_t parameter, const GradientFactors& factors) const {
  const at::Tensor& row = parameters_[parameter].rows[0];
  return row.is_contiguous() && 2 * memory_of({factors}) <= row.numel();
}

bool GrainSums::add_sum(size_t parameter, int64_t grain, Sum sum) {
  const c10::AutoGradMode no_grad(false);
  Column& column = parameters_[parameter];
  if (grain < column.next) return false;
  while (column.next < grain) push(column, {});
  push(column, std::move(sum));
  column.any = true;
  return true;
}

bool GrainSums::any(size_t parameter) const {
  return parameters_[parameter].any;
}

void GrainSums::push(Column& column, Sum sum) {
  auto& blocks = column.blocks;
  GrainBlock last{.begin = column.next++, .size = 1};
  size_t number = blocks.size();
  for (; number > 0 && are_halves(blocks[number - 1], last); --number) {
    last = {.begin = blocks[number - 1].begin, .size = 2 * last.size};
  }
  column.sums.push_back(std::move(sum));
  add_up(column, number);
  column.sums.resize(number + 1);
  blocks.resize(number);
  blocks.push_back(last);
}

// False: these do not all have factors, or their memory is too large.
bool GrainSums::join_factors(Column& column, size_t into) {
  auto& sums = column.sums;
  int64_t memory = 0;
  for (size_t number = into; number < sums.size(); ++number) {
    if (sums[number].factors.empty()) return false;
    memory += memory_of(sums[number].factors);
  }
  if (memory > column.rows[0].numel()) return false;
  auto& all = sums[into].factors;
  for (size_t number = into + 1; number < sums.size(); ++number) {
    all.insert(all.end(), sums[number].factors.begin(), sums[number].factors.end());
  }
  return true;
}

// To the block's row, which the last of several blocks does not always have.
void GrainSums::sum_factors(Column& column, size_t number) {
  auto& [value, factors] = column.sums[number];
  if (factors.empty()) return;
  value = number < column.rows.size() ? column.rows[number] : at::empty_like(column.rows[0]);
  sum_products(factors, value);
  factors.clear();
}

void GrainSums::add_up(Column& column, size_t into) {
  auto& sums = column.sums;
  if (join_factors(column, into)) return;
  std::vector<size_t> numbers;
  c10::SmallVector<const at::Tensor*, 8> values;
  for (size_t number = into; number < sums.size(); ++number) {
    sum_factors(column, number);
    if (!sums[number].value.defined()) continue;
    numbers.push_back(number);
    values.push_back(&sums[number].value);
  }
  if (values.empty() || (values.size() == 1 && numbers[0] == into)) return;
  at::Tensor row = column.rows[into];
  if (values.size() == 1) {
    row.copy_(*values[0]);
  } else if (!comm::add_from_the_last(values, row)) {
    at::Tensor sum = *values.back();
    for (size_t place = values.size() - 1; place-- > 0;) {
      at::Tensor here = place == 0 ? row : column.rows[numbers[place]];
      sum = at::add_out(here, *values[place], sum);
    }
  }
  sums[into].value = row;
}

void GrainSums::finish() {
  const c10::AutoGradMode no_grad(false);
  for (auto& column : parameters_) {
    while (column.next < run_.end) push(column, {});
    for (size_t row = 0; row < column.blocks.size(); ++row) {
      sum_factors(column, row);
      at::Tensor& sum = column.sums[row].value;
      const at::Tensor& values = column.rows[row];
      if (!sum.defined()) {
        values.fill_(-0.0);
      } else if (!sum.is_same(values)) {
        values.copy_(sum);
      }
      sum = values;
    }
  }
}

std::vector<at::Tensor> GrainSums::rows() const {
  return {rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(blocks_of(run_).size())};
}

}  // namespace lockstep
