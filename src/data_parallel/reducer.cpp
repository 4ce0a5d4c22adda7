#include "reducer.hpp"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "comm/purpose.hpp"
#include "devices/cuda_graph.hpp"
#include "flat_view.hpp"
#include "ranks/rank_place.hpp"

namespace lockstep {
namespace {

// `later` waits for all that is on `earlier` by now; the CPU does not.
void queue_after(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

c10::Stream current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

Reducer::Reducer(const std::vector<std::pair<std::string, at::Tensor>>& parameters, Rank& rank,
                 const DataParallelOptions& options)
    : Averaging(rank.name() + ": DataParallel"),
      rank_(rank),
      options_(options),
      report_(rank, rank.name() + ": DataParallel"),
      alone_(rank, rank.name() + ": DataParallel") {
  if (options_.bucket_bytes < 1 || options_.first_bucket_bytes < 1) {
    throw Error("DataParallel: bucket_bytes is " + std::to_string(options_.bucket_bytes) +
                " and first_bucket_bytes is " + std::to_string(options_.first_bucket_bytes) +
                "; both must be at least 1");
  }
  if (!rank_.device().is_cpu()) {
    poll_stream_ = c10::impl::VirtualGuardImpl(rank_.device().type()).getStreamFromGlobalPool(rank_.device());
  }
  if (options_.hook && options_.hook->taken_.exchange(true)) {
    throw Error(rank_.name() +
                ": DataParallel: its communication hook is another DataParallel's already; make one for each rank, "
                "in the function that run() calls");
  }
  std::set<const c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (parameter.requires_grad()) {
      slots_.push_back({.name = name, .parameter = parameter});
    } else {
      frozen_.emplace_back(name, parameter);
    }
  }
  // The last layers' gradients come first.
  std::vector<size_t> order(slots_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  make_buckets(order, order.size());

  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].hook = std::make_unique<GradientHook>(slots_[i].parameter, [this, i] { on_gradient(i); });
  }
}

Reducer::~Reducer() {
  if (options_.hook) options_.hook->taken_ = false;
}

void Reducer::average(const std::function<void()>& backward, const PartSizes& sizes) {
  check_that_frozen_stay_frozen();
  check_that_steps_were_averaged();
  if (options_.hook && poll_stream_ && is_recording()) {
    throw Error(rank_.name() +
                ": DataParallel: a CUDA graph cannot record what a communication hook does; record the step without "
                "one, or take no graph");
  }
  start();
  backward();
  finish(sizes);
}

void Reducer::abandon() {
  const std::lock_guard lock(mutex_);
  active_ = false;
  open_.clear();
}

void Reducer::listen(bool last) {
  const std::lock_guard lock(mutex_);
  listening_ = last;
}

void Reducer::check_that_frozen_stay_frozen() const {
  for (const auto& [name, parameter] : frozen_) {
    if (!parameter.requires_grad()) continue;
    throw Error(rank_.name() + ": DataParallel: " + name +
                " needed no gradient when this DataParallel was made, and needs one now, which would not be averaged. "
                "Build the DataParallel after requires_grad_(true)");
  }
}

void Reducer::check_that_steps_were_averaged() {
  const std::lock_guard lock(mutex_);
  alone_.check();
}

void Reducer::start() {
  const std::lock_guard lock(mutex_);
  for (auto& slot : slots_) slot.ready = slot.had = false;
  alone_.forget();
  for (auto& bucket : buckets_) bucket.missing = bucket.slots.size();
  ready_order_.clear();
  next_bucket_ = turn_ = place_ = 0;
  active_ = true;
}

void Reducer::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (!active_) return alone_.note(slot.name, slot.parameter);
  if (slot.ready) {  // a backward inside the backward, as activation checkpointing does it
    if (slot.bucket < next_bucket_) {
      throw Error("DataParallel: the gradient of " + slot.name +
                  " grew again after it had been averaged, in the same backward. Use the option overlap = false");
    }
    return fill(slot);
  }
  const comm::Purpose purpose(backward_name());
  fill(slot);
  if (!listening_) return;  // the next backwards add to what is in the bucket now
  slot.ready = true;
  --buckets_[slot.bucket].missing;
  ready_order_.push_back(index);
  if (!options_.overlap) return;
  take_turns(/*may_wait=*/false);
  poll();
}

void Reducer::fill(Slot& slot) {
  const c10::AutoGradMode no_grad(false);
  auto& gradient = slot.parameter.mutable_grad();
  slot.had = gradient.defined();
  if (!gradient.defined() && !slot.parameter.requires_grad()) {
    slot.view.zero_();  // frozen since: no gradient, so that an optimizer leaves it alone
    return;
  }
  if (!gradient.defined()) {
    slot.view.zero_();
  } else if (gradient.layout() != at::kStrided) {
    throw Error("DataParallel: the gradient of " + slot.name +
                " is sparse, which cannot be averaged; build its Embedding with sparse(false)");
  } else if (same_memory(gradient, slot.view)) {
    return;
  } else {
    slot.view.copy_(gradient);
  }
  gradient = slot.view;
}

void Reducer::take_turns(bool may_wait) {
  for (;;) {
    for (; place_ < turn_; ++place_) {
      Bucket& bucket = buckets_[place_];
      if (!bucket.round.next) continue;
      if (!may_wait && !complete(bucket)) return;
      go_on(bucket);
    }
    if (next_bucket_ < buckets_.size()) {
      if (buckets_[next_bucket_].missing > 0) return;
      turn_ = next_bucket_;
      post(next_bucket_);
    } else {
      turn_ = buckets_.size();
      if (std::none_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) { return bucket.round.next; })) return;
    }
    place_ = 0;
  }
}

void Reducer::post(size_t index) {
  Bucket& bucket = buckets_[index];
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    bucket.range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    bucket.range->_setAsync();
    bucket.range->before("lockstep::bucket " + std::to_string(index) + " allreduce");
  }
  // The average, and not the sum, because gradients of an earlier backward that are equal on all ranks must stay what
  // they are.
  if (options_.hook) {
    if (poll_stream_) queue_after(current_stream(rank_.device()), *poll_stream_);
    const c10::OptionalStreamGuard guard(poll_stream_);
    const c10::AutoGradMode no_grad(false);
    bucket.round = options_.hook->average(bucket.gradients, rank_);
  } else {
    bucket.round = {.work = post_allreduce(rank_, bucket.gradients.flat, c10d::ReduceOp::AVG)};
  }
  ++next_bucket_;
  open_.push_back(index);
}

// A work that is found complete makes the current stream wait for it. That must not be the stream on which backward
// goes on, so polling has a stream of its own.
bool Reducer::complete(const Bucket& bucket) const {
  const c10::OptionalStreamGuard guard(poll_stream_);
  return !bucket.round.work || bucket.round.work->isCompleted();
}

void Reducer::go_on(Bucket& bucket) {
  const c10::OptionalStreamGuard guard(poll_stream_);
  const c10::AutoGradMode no_grad(false);
  if (bucket.round.work) bucket.round.work->wait();
  bucket.round = bucket.round.next();
}

void Reducer::end(Bucket& bucket) {
  if (bucket.round.finish) {
    const c10::OptionalStreamGuard guard(poll_stream_);
    const c10::AutoGradMode no_grad(false);
    if (bucket.round.work) bucket.round.work->wait();
    bucket.round.finish();
    bucket.round = {};
  }
  bucket.range.reset();
}

// Not while a CUDA graph records, which only a backend with streams of its own can be part of: it needs no polling.
void Reducer::poll() {
  if (open_.empty() || (poll_stream_ && is_recording())) return;
  std::erase_if(open_, [&](size_t index) {
    Bucket& bucket = buckets_[index];
    if (!complete(bucket) || bucket.round.next) return false;
    end(bucket);
    return true;
  });
}

void Reducer::finish(const PartSizes& sizes) {
  const std::lock_guard lock(mutex_);
  const comm::Purpose purpose(backward_name());
  active_ = false;
  for (size_t index = next_bucket_; index < buckets_.size(); ++index) {
    for (const size_t slot : buckets_[index].slots) {
      if (!slots_[slot].ready) fill(slots_[slot]);
    }
    buckets_[index].missing = 0;
  }
  take_turns(/*may_wait=*/true);
  // A CUDA graph cannot record what the host reads. All ranks record the same steps.
  const bool reports = !(poll_stream_ && is_recording());
  if (reports) {
    std::vector<bool> had;
    for (const auto& slot : slots_) had.push_back(slot.had);
    report_.post(had, sizes);
  }
  for (auto& bucket : buckets_) {
    if (bucket.round.work && !bucket.round.finish) bucket.round.work->wait();
    end(bucket);
    bucket.round = {};
  }
  if (options_.hook && poll_stream_) queue_after(*poll_stream_, current_stream(rank_.device()));
  open_.clear();
  if (reports) report_.wait();
  leave_unused_undefined(reports);
  if (order_.empty()) learn_order();
}

// As on one device: an optimizer's momentum and weight decay leave a parameter without a gradient alone. Without a
// report, in a step that a CUDA graph records, what the steps before it have told still holds.
void Reducer::leave_unused_undefined(bool reported) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.had) continue;
    if (reported) slot.unused = !report_.any_had(i);
    if (slot.unused) slot.parameter.mutable_grad().reset();
  }
}

// One allreduce tells every rank what rank 0 has seen, and which parameters any rank used.
void Reducer::learn_order() {
  const auto count = static_cast<int64_t>(slots_.size());
  if (count == 0) return;
  at::Tensor table = at::zeros({2, count}, at::kLong);  // the place in rank 0's order, from 1; how many ranks used it
  auto cells = table.accessor<int64_t, 2>();
  for (size_t place = 0; place < ready_order_.size(); ++place) {
    const auto slot = static_cast<int64_t>(ready_order_[place]);
    if (rank_.index() == 0) cells[0][slot] = static_cast<int64_t>(place) + 1;
    cells[1][slot] = 1;
  }
  table = table.to(rank_.device());
  rank_.allreduce(table);
  table = table.cpu();
  const auto all = table.accessor<int64_t, 2>();

  std::vector<int64_t> order;
  for (int64_t slot = 0; slot < count; ++slot) {
    if (all[0][slot] > 0) order.push_back(slot);
  }
  if (order.empty()) return;  // rank 0 had an empty part
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return all[0][a] < all[0][b]; });
  follow(std::move(order));

  std::vector<std::string> unused;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (all[1][static_cast<int64_t>(slot)] == 0) unused.push_back(slots_[slot].name);
  }
  warn_of_unused(unused);
}

void Reducer::follow(std::vector<int64_t> order) {
  std::vector<size_t> all(order.begin(), order.end());
  std::vector<bool> used(slots_.size(), false);
  for (const size_t slot : all) used[slot] = true;
  for (size_t slot = slots_.size(); slot-- > 0;) {
    if (!used[slot]) all.push_back(slot);
  }
  make_buckets(all, order.size());
  order_ = std::move(order);
}

std::vector<int64_t> Reducer::order() const {
  if (order_.empty()) return {};
  std::vector<int64_t> order{static_cast<int64_t>(slots_.size())};
  order.insert(order.end(), order_.begin(), order_.end());
  return order;
}

void Reducer::set_order(const std::vector<int64_t>& order) {
  const std::lock_guard lock(mutex_);
  if (order.empty() || order.front() != static_cast<int64_t>(slots_.size())) return;
  std::vector<int64_t> slots;
  std::copy_if(order.begin() + 1, order.end(), std::back_inserter(slots), [](int64_t slot) { return slot >= 0; });
  const std::set<int64_t> different(slots.begin(), slots.end());
  if (slots.empty() || different.size() < slots.size()) return;
  if (*different.rbegin() < static_cast<int64_t>(slots_.size())) follow(std::move(slots));
}

void Reducer::warn_of_unused(const std::vector<std::string>& names) const {
  if (names.empty() || rank_.index() != 0) return;
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
  comm::RankPlace::of(rank_).warn("DataParallel: no rank used these parameters in the first backward: " + list +
                                  ". Their gradients stay undefined, and their buckets are averaged after backward. If "
                                  "they are never used, requires_grad_(false) saves that");
}

// Gradients keep their values: they move from the old buckets to the new ones.
void Reducer::make_buckets(const std::vector<size_t>& order, size_t used) {
  const c10::AutoGradMode no_grad(false);
  std::vector<Bucket> buckets;
  std::map<at::ScalarType, Bucket> filling;
  std::map<at::ScalarType, int64_t> bytes;
  const auto close = [&](at::ScalarType type) {
    buckets.push_back(std::move(filling[type]));
    filling.erase(type);
    bytes.erase(type);
  };
  const auto close_all = [&] {
    while (!filling.empty()) close(filling.begin()->first);
  };
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == used) close_all();  // what comes during backward does not wait for what never comes
    const at::Tensor& parameter = slots_[order[i]].parameter;
    const auto type = parameter.scalar_type();
    filling[type].slots.push_back(order[i]);
    bytes[type] += static_cast<int64_t>(parameter.nbytes());
    if (bytes[type] >= (buckets.empty() ? options_.first_bucket_bytes : options_.bucket_bytes)) close(type);
  }
  close_all();

  for (size_t index = 0; index < buckets.size(); ++index) {
    Bucket& bucket = buckets[index];
    int64_t size = 0;
    for (const size_t slot : bucket.slots) size += slots_[slot].parameter.numel();
    const auto type = slots_[bucket.slots[0]].parameter.scalar_type();
    bucket.gradients.flat = at::zeros({size}, at::TensorOptions(rank_.device()).dtype(type));
    int64_t offset = 0;
    for (const size_t number : bucket.slots) {
      Slot& slot = slots_[number];
      const at::Tensor old = std::exchange(slot.view, view_in_flat(slot.parameter, bucket.gradients.flat, offset));
      bucket.gradients.names.push_back(slot.name);
      bucket.gradients.gradients.push_back(slot.view);
      slot.bucket = index;
      offset += slot.parameter.numel();
      const at::Tensor& gradient = slot.parameter.grad();
      if (old.defined() && gradient.defined() && same_memory(gradient, old)) fill(slot);
    }
  }
  buckets_ = std::move(buckets);
}

}  // namespace lockstep
