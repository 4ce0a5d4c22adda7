#include "grain_sums.hpp"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "comm/reduction.hpp"

#include <utility>

namespace lockstep {
namespace {

int64_t memory_of(const std::vector<GradientFactors>& factors) {  // gives the number of values
  int64_t values = 0;
  for (const auto& one : factors) values += one.grad.numel() + one.x.numel();
  return values;
}

int64_t memory_of_product(const GradientFactors& factors) {
  return factors.grad.size(0) * factors.x.size(1);
}

}  // namespace

GrainSums::GrainSums(size_t parameters, int64_t columns, const at::TensorOptions& options, View view)
    : columns_(columns), options_(options), view_(std::move(view)), parameters_(parameters) {}

const at::Tensor& GrainSums::row(size_t number) {
  if (number >= rows_.size() || !rows_[number].defined()) {
    const at::Tensor memory = at::zeros({columns_}, options_);
    if (number == 0) own_first_ = memory;
    set_row(number, memory);
  }
  return rows_[number];
}

void GrainSums::set_row(size_t number, const at::Tensor& memory) {
  if (number >= rows_.size()) {
    rows_.resize(number + 1);
    for (auto& column : parameters_) column.rows.resize(number + 1);
  }
  if (rows_[number].is_same(memory)) return;
  rows_[number] = memory;
  for (size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    parameters_[parameter].rows[number] = memory.defined() ? view_(parameter, memory) : at::Tensor();
  }
}

void GrainSums::begin(const Range& run, const at::Tensor& first) {
  run_ = run;
  set_row(0, first.defined() ? first : own_first_);
  for (auto& column : parameters_) {
    column.next = run.begin;
    column.blocks.clear();
    column.sums.clear();
    column.any = false;
  }
}

// Other ranks may still have a tensor of a row, by their handles of the finished call.
void GrainSums::release() {
  for (auto& column : parameters_) column.sums.clear();
  for (size_t number = rows_.size(); number-- > 0;) {
    const at::Tensor memory = rows_[number];
    if (!memory.defined() || (number == 0 && !memory.is_same(own_first_))) continue;
    set_row(number, {});
    memory.storage().unsafeGetStorageImpl()->reset();
  }
  own_first_.reset();
}

bool GrainSums::takes(const GradientFactors& factors) {
  return 2 * memory_of({factors}) <= memory_of_product(factors);
}

bool GrainSums::add(size_t parameter, int64_t grain, Sum gradient) {
  const c10::AutoGradMode no_grad(false);
  Column& column = parameters_[parameter];
  if (grain < column.next) return false;
  while (column.next < grain) push(column, {});
  push(column, std::move(gradient));
  column.any = true;
  return true;
}

bool GrainSums::any(size_t parameter) const {
  return parameters_[parameter].any;
}

void GrainSums::push(Column& column, Sum sum) {
  const bool has_value = sum.value.defined();
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
  if (has_value && stays(last)) take_to_row(column, number);
}

bool GrainSums::stays(const GrainBlock& block) const {
  return block.begin % (2 * block.size) != 0 || block.begin + 2 * block.size > run_.end;
}

// Gives false if not all of these have factors, or if their memory is too large.
bool GrainSums::join_factors(Column& column, size_t into) {
  auto& sums = column.sums;
  int64_t memory = 0;
  for (size_t number = into; number < sums.size(); ++number) {
    if (sums[number].factors.empty()) return false;
    memory += memory_of(sums[number].factors);
  }
  auto& all = sums[into].factors;
  if (memory > memory_of_product(all[0])) return false;
  for (size_t number = into + 1; number < sums.size(); ++number) {
    all.insert(all.end(), sums[number].factors.begin(), sums[number].factors.end());
  }
  return true;
}

void GrainSums::sum_factors(Column& column, size_t number, bool to_row) {
  auto& [value, factors] = column.sums[number];
  if (factors.empty()) return;
  if (to_row) row(number);
  value = to_row ? column.rows[number] : at::empty({factors[0].grad.size(0), factors[0].x.size(1)}, options_);
  factors[0].sum_products(factors, value);
  factors.clear();
}

void GrainSums::take_to_row(Column& column, size_t number) {
  row(number);
  const at::Tensor& values = column.rows[number];
  at::Tensor& sum = column.sums[number].value;
  if (!sum.is_same(values)) values.copy_(sum);
  sum = values;
}

void GrainSums::add_up(Column& column, size_t into) {
  auto& sums = column.sums;
  if (join_factors(column, into)) return;
  std::vector<size_t> numbers;
  c10::SmallVector<const at::Tensor*, 8> values;
  for (size_t number = into; number < sums.size(); ++number) {
    sum_factors(column, number, /*to_row=*/number == into);
    if (!sums[number].value.defined()) continue;
    numbers.push_back(number);
    values.push_back(&sums[number].value);
  }
  if (values.empty() || (values.size() == 1 && numbers[0] == into)) return;
  row(into);
  at::Tensor there = column.rows[into];
  if (values.size() == 1) {
    there.copy_(*values[0]);
  } else if (!comm::add_from_the_last(values, there)) {
    at::Tensor sum = *values.back();
    for (size_t place = values.size() - 1; place-- > 0;) {
      row(numbers[place]);
      at::Tensor here = place == 0 ? there : column.rows[numbers[place]];
      sum = at::add_out(here, *values[place], sum);
    }
  }
  sums[into].value = there;
}

void GrainSums::finish() {
  const c10::AutoGradMode no_grad(false);
  for (auto& column : parameters_) {
    while (column.next < run_.end) push(column, {});
    for (size_t number = 0; number < column.blocks.size(); ++number) {
      sum_factors(column, number, /*to_row=*/true);
      if (column.sums[number].value.defined()) {
        take_to_row(column, number);
      } else {
        row(number);
        column.sums[number].value = column.rows[number].fill_(-0.0);
      }
    }
  }
}

std::vector<at::Tensor> GrainSums::rows() const {
  return {rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(blocks_of(run_).size())};
}

}  // namespace lockstep
