#include "divided_parameters.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "base/exception_text.hpp"
#include "comm/purpose.hpp"

#include <algorithm>

namespace lockstep {
namespace {

// Keeps operators that are called here from counting as uses of the parameters, whatever mode the user computes in.
struct Quiet {
  const at::DisableRecordFunctionGuard no_callbacks = {};
  const c10::InferenceMode no_inference{false};
  const c10::AutoGradMode no_grad{false};
};

int64_t version_of(const ShardedBucket& unit) {
  int64_t version = 0;
  for (const auto& place : unit.places) version += place.parameter._version();
  return version;
}

bool contains(const std::vector<size_t>& units, size_t unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

}  // namespace

DividedParameters::DividedParameters(std::vector<ShardedBucket> units, const Rank& rank, bool ahead)
    : rank_(rank), ahead_(ahead) {
  size_t largest = 0, slices = 0;
  for (auto& unit : units) {
    largest = std::max(largest, unit.values.nbytes());
    slices += unit.slice.nbytes();
    units_.push_back({.parameters = std::move(unit)});
  }
  most_bytes_ = std::max(largest + slices / 5, size_t{2 * kLeastUnitBytes});
  for (size_t unit = 0; unit < units_.size(); ++unit) empty_memory(units_[unit].parameters.values, *this, unit);
  watch_.emplace();
}

DividedParameters::~DividedParameters() {
  end("the net that divided these parameters among the ranks is gone");
}

// ---- While operators run.

void DividedParameters::before_operator(const std::vector<size_t>& units) noexcept {
  const std::lock_guard lock(mutex_);
  ++operators_;
  if (holds_ > 0 || failure_) return;
  try {
    need(units);
  } catch (...) {
    failure_ = std::current_exception();
    refuse_all(exception_text(failure_));
  }
}

void DividedParameters::after_operator() noexcept {
  const std::lock_guard lock(mutex_);
  --operators_;
}

// The units of an operator within another one add to those that are there. See 2.
void DividedParameters::need(const std::vector<size_t>& units) {
  const bool outermost = operators_ == 1;
  const auto is_current = [this](size_t unit) { return contains(current_, unit); };
  if (std::all_of(units.begin(), units.end(), is_current) && (!outermost || units.size() == current_.size())) return;
  const Quiet quiet;
  if (outermost) {
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (!contains(units, unit)) drop(unit);
    }
    current_.clear();
  }
  for (const size_t unit : units) {
    if (contains(current_, unit)) continue;
    if (!units_[unit].whole) {
      post(unit);
      complete(unit);
    }
    followers_[latest_] = unit;
    latest_ = {latest_.second, unit};
    current_.push_back(unit);
  }
  if (outermost && ahead_) gather_ahead();
}

void DividedParameters::gather_ahead() {
  const auto next = followers_.find(latest_);
  if (next == followers_.end() || units_[next->second].whole) return;
  size_t bytes = units_[next->second].parameters.values.nbytes();
  for (const size_t unit : current_) bytes += units_[unit].parameters.values.nbytes();
  if (bytes <= most_bytes_) post(next->second);
}

// ---- A unit.

void DividedParameters::post(size_t index) {
  Unit& unit = units_[index];
  if (unit.work) return;
  const ShardedBucket& parameters = unit.parameters;
  const std::string use = "the parameters of " + parameters.places.back().name + "'s unit";
  const comm::Purpose purpose(use);
  unit.memory = at::empty(parameters.values.sizes(), parameters.values.options());
  at::Tensor slice = parameters.slice;
  unit.work = rank_.backend()._allgather_base(unit.memory, slice);
}

void DividedParameters::complete(size_t index) {
  Unit& unit = units_[index];
  unit.work->wait();
  unit.work.reset();
  fill_memory(unit.parameters.values, unit.memory, *this, index);
  unit.memory.reset();
  unit.whole = true;
  unit.version = version_of(unit.parameters);
}

// Waits for a gather under way, since the other ranks wait for it too. Other ranks' handles of the call may still hold
// a tensor of the unit's memory.
void DividedParameters::drop(size_t index) {
  Unit& unit = units_[index];
  if (unit.work) {
    unit.work->wait();
    unit.memory.storage().unsafeGetStorageImpl()->reset();
  }
  unit.work.reset();
  unit.memory.reset();
  if (!unit.whole) return;
  // The holder of all parameters may have made changes that leave their versions alone.
  if (holds_ > 0 || unit.version != version_of(unit.parameters)) {
    unit.parameters.slice.copy_(slice_of_flat(unit.parameters.values, rank_));
  }
  empty_memory(unit.parameters.values, *this, index);
  unit.whole = false;
}

// ---- All of them.

void DividedParameters::drop_all() {
  for (size_t unit = 0; unit < units_.size(); ++unit) drop(unit);
  current_.clear();
  latest_ = {kNone, kNone};
}

void DividedParameters::gather_all() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!units_[unit].whole) post(unit);
  }
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!units_[unit].whole) complete(unit);
  }
}

void DividedParameters::put_away() {
  const std::lock_guard lock(mutex_);
  const Quiet quiet;
  drop_all();
}

void DividedParameters::bring_back() {
  const std::lock_guard lock(mutex_);
  const Quiet quiet;
  if (holds_ > 0) gather_all();
}

void DividedParameters::hold() {
  const std::lock_guard lock(mutex_);
  const Quiet quiet;
  if (holds_ == 0) gather_all();
  ++holds_;
}

void DividedParameters::release() {
  const std::lock_guard lock(mutex_);
  const Quiet quiet;
  try {  // a destructor calls this, so it must not throw
    if (holds_ == 1 && !ended_) drop_all();
  } catch (...) {
    failure_ = std::current_exception();
    refuse_all(exception_text(failure_));
  }
  --holds_;
}

void DividedParameters::rethrow_failure() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void DividedParameters::refuse_all(const std::string& text) {
  for (const auto& unit : units_) {
    if (!unit.whole) refuse_memory(unit.parameters.values, text);
  }
}

// Gathers under way are not waited for: if another rank has failed they may never end. A work keeps its tensors.
void DividedParameters::end(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(ended_, true)) return;
  watch_.reset();
  for (const auto& unit : units_) {
    if (unit.whole || !failure_) leave_memory(unit.parameters.values);  // otherwise the unit is refused already
  }
  refuse_all(reason);
}

}  // namespace lockstep
