#include "reducer.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <lockstep/base/error.hpp>

#include "comm/purpose.hpp"
#include "devices/device_streams.hpp"
#include "flat_view.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_wait.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>

namespace lockstep {

Reducer::Reducer(const torch::nn::Module& module, const Rank& rank, const DataParallelOptions& options)
    : GradientBuckets(rank, {.collective = "allreduce", .overlap = options.overlap, .check = options.grain_check},
                      rank.world_size() > 1 || options.hook),
      options_(options),
      module_(module) {
  if (options_.bucket_bytes < 1 || options_.first_bucket_bytes < 1) {
    throw Error(name() + ": bucket_bytes is " + std::to_string(options_.bucket_bytes) + " and first_bucket_bytes is " +
                std::to_string(options_.first_bucket_bytes) + "; both must be at least 1");
  }
  if (!rank_.device().is_cpu()) poll_stream_ = stream_beside(rank_.device());
  if (options_.hook && options_.hook->taken_.exchange(true)) {
    throw Error(name() +
                ": its communication hook is another DataParallel's already; make one for each rank, in the function "
                "that run() calls");
  }
  take_parameters();
}

Reducer::~Reducer() {
  if (options_.hook) options_.hook->taken_ = false;
}

void Reducer::take_parameters() {
  parameters_ = TrainedParameters(module_);
  forget_slots();
  for (const auto& [name, parameter] : parameters_.all()) add_slot(name, parameter);
  // The last layers' gradients come first.
  std::vector<size_t> order(slots_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  make_buckets(order, order.size());
}

// A rank that has unfrozen nothing makes another call here. That is an Error too, over NCCL after its timeout.
void Reducer::begin(bool by_grains) {
  if (by_grains && !std::exchange(uses_buckets_, true)) take_parameters();
  if (!parameters_.unfrozen().empty()) {
    const std::string purpose = "the parameters of a DataParallel of which some were unfrozen";
    const comm::Purpose of_call(purpose);
    take_parameters();
    std::string mine;
    for (const auto& slot : slots_) mine += " " + slot.name;
    for (const auto& theirs : texts_of_all_ranks(mine, rank_)) {
      if (theirs == mine) continue;
      throw Error(name() + ": the ranks have unfrozen different parameters: this one trains" + mine + ", and another" +
                      theirs + ". Call requires_grad_() alike on all ranks",
                  {Error::difference});
    }
  }
  turn_ = place_ = 0;
  if (options_.hook && by_grains) {
    throw Error(name() +
                ": a communication hook's averages depend on the number of ranks, and by grains they must not. Leave "
                "out the hook, or BatchOptions::grain");
  }
  if (!by_grains) return;
  const c10::AutoGradMode no_grad(false);
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot].parameter.grad().defined()) let_go_of(slot);
  }
}

// ---- Gradients and their memory.

void Reducer::collect(size_t index) {
  GradientSlot& slot = slots_[index];
  auto& gradient = slot.parameter.mutable_grad();
  slot.had = gradient.defined();
  const c10::AutoGradMode no_grad(false);
  if (!gradient.defined()) {
    let_go_of(index);
    slot.view.zero_();
    if (!slot.parameter.requires_grad()) return;  // it was frozen since: an optimizer leaves it alone
  } else {
    slot.refuse_sparse(name());
    if (same_memory(gradient, slot.view)) return;
    let_go_of(index);
    slot.view.copy_(gradient);
  }
  gradient = slot.view;
}

bool Reducer::take_product(size_t index, const GradientFactors& factors) {
  GradientSlot& slot = slots_[index];
  if (slot.parameter.grad().defined() || !slot.view.is_contiguous()) return false;
  const c10::AutoGradMode no_grad(false);
  let_go_of(index);
  factors.sum_products({factors}, slot.view);
  slot.parameter.mutable_grad() = slot.view;
  return true;
}

// LibTorch's zero_grad() leaves a gradient to whoever keeps it. So it moves out of the bucket. A hook may have views of
// its own, and a CUDA graph writes to the recorded place.
void Reducer::let_go_of(size_t index) {
  GradientSlot& slot = slots_[index];
  constexpr size_t kOwn = 2;  // the slot and the bucket's list hold the view
  if (slot.view.use_count() <= kOwn || options_.hook || records()) return;
  GradientBucket& gradients = exchanges_[slot.bucket].gradients;
  at::Tensor kept = std::exchange(slot.view, view_in_flat(slot.parameter, gradients.flat, slot.offset));
  const auto& slots = buckets_[slot.bucket].slots;
  const auto place = std::find(slots.begin(), slots.end(), index) - slots.begin();
  gradients.gradients[static_cast<size_t>(place)] = slot.view;
  kept.set_data(kept.clone());
}

// Gradients keep their values: they move from the old buckets to the new ones.
void Reducer::make_buckets(const std::vector<size_t>& order, size_t used) {
  if (!uses_buckets_) return;
  std::vector<GradientSlots::Bucket> buckets;
  std::map<at::ScalarType, GradientSlots::Bucket> filling;
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
    if (i == used) close_all();  // buckets that fill do not wait for slots that never do
    const at::Tensor& parameter = slots_[order[i]].parameter;
    const auto type = parameter.scalar_type();
    filling[type].slots.push_back(order[i]);
    bytes[type] += static_cast<int64_t>(parameter.nbytes());
    if (bytes[type] >= (buckets.empty() ? options_.first_bucket_bytes : options_.bucket_bytes)) close(type);
  }
  close_all();

  buckets_ = std::move(buckets);
  exchanges_.assign(buckets_.size(), {});
  order_.resize(buckets_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  for (const size_t bucket : order_) {
    for (const size_t slot : buckets_[bucket].slots) slots_[slot].bucket = bucket;
  }
  for (const size_t bucket : order_) give_memory(bucket);
}

void Reducer::give_memory(size_t index) {
  const c10::AutoGradMode no_grad(false);
  auto& bucket = buckets_[index];
  GradientBucket& gradients = exchanges_[index].gradients;
  int64_t size = 0;
  for (const size_t slot : bucket.slots) size += slots_[slot].parameter.numel();
  const auto type = slots_[bucket.slots[0]].parameter.scalar_type();
  const int64_t ranks = rank_.world_size(), columns = (size + ranks - 1) / ranks * ranks;
  exchanges_[index].memory = at::zeros({columns}, at::TensorOptions(rank_.device()).dtype(type));
  bucket.columns = columns;
  bucket.row = exchanges_[index].memory;
  gradients.flat = exchanges_[index].memory.narrow(0, 0, size);
  int64_t offset = 0;
  for (const size_t number : bucket.slots) {
    GradientSlot& slot = slots_[number];
    const at::Tensor old = std::exchange(slot.view, view_in_flat(slot.parameter, gradients.flat, offset));
    gradients.names.push_back(slot.name);
    gradients.gradients.push_back(slot.view);
    slot.offset = offset;
    offset += slot.parameter.numel();
    const at::Tensor& gradient = slot.parameter.grad();
    if (old.defined() && gradient.defined() && same_memory(gradient, old)) Reducer::collect(number);
  }
}

// The first sum, and in the end the average, lie where .grad is to be, unless they add to what is there.
void Reducer::leave_gradients() {
  const c10::AutoGradMode no_grad(false);
  for (size_t index = 0; index < buckets_.size(); ++index) {
    Exchange& exchange = exchanges_[index];
    const bool adds = !exchange.average.is_same(exchange.memory);
    for (const size_t number : buckets_[index].slots) {
      GradientSlot& slot = slots_[number];
      if (adds && !slot.before.defined()) slot.view.zero_();
      if (slot.before.defined() && !same_memory(slot.before, slot.view)) slot.view.copy_(slot.before);
      slot.parameter.mutable_grad() = slot.view;
    }
    if (adds) {
      const at::Tensor& flat = exchange.gradients.flat;
      flat.add_(exchange.average.narrow(0, 0, flat.numel()));
    }
    exchange.average.reset();
  }
}

// ---- Rounds.

void Reducer::move_on(bool may_wait) {
  take_turns(may_wait);
  if (!may_wait) poll();
}

void Reducer::take_turns(bool may_wait) {
  for (;;) {
    for (; place_ < turn_; ++place_) {
      Exchange& exchange = exchanges_[place_];
      if (!exchange.round.next) continue;
      if (!may_wait && !is_complete(exchange)) return;
      go_on(exchange);
    }
    if (next_ < buckets_.size()) {
      if (!next_is_ready()) return;
      turn_ = next_;
      post_next();
    } else {
      turn_ = buckets_.size();
      const auto goes_on = [](const Exchange& exchange) { return static_cast<bool>(exchange.round.next); };
      if (std::none_of(exchanges_.begin(), exchanges_.end(), goes_on)) return;
    }
    place_ = 0;
  }
}

// Averages instead of adding up, because gradients of an earlier backward that are equal on all ranks must stay as they
// are.
void Reducer::post(size_t index) {
  Exchange& exchange = exchanges_[index];
  if (in_rounds()) {
    // The stream that adds the average to .grad allocates it.
    if (by_grains()) exchange.average = buckets_[index].sums->first_row();
    if (poll_stream_) queue_after(current_stream(rank_.device()), *poll_stream_);
    const c10::OptionalStreamGuard guard(poll_stream_);
    const c10::AutoGradMode no_grad(false);
    if (by_grains()) {
      exchange.round = terms_.post(index, exchange.average);
    } else {
      exchange.round = options_.hook->average(exchange.gradients, rank_);
    }
  } else {
    exchange.round = {.work = CommunicationHook::post_allreduce(rank_, exchange.gradients.flat, c10d::ReduceOp::AVG)};
  }
  open_.push_back(index);
}

// If a work is found complete, the current stream waits for it. Backward's stream must not, so polling has a stream of
// its own. The works of a recording cannot be asked.
bool Reducer::is_complete(const Exchange& exchange) const {
  if (records()) return !exchange.round.work;
  const c10::OptionalStreamGuard guard(poll_stream_);
  return !exchange.round.work || exchange.round.work->isCompleted();
}

void Reducer::go_on(Exchange& exchange) {
  const c10::OptionalStreamGuard guard(poll_stream_);
  const c10::AutoGradMode no_grad(false);
  if (exchange.round.work) exchange.round.work->wait();
  exchange.round = exchange.round.next();
}

void Reducer::end_of(size_t bucket) {
  CommunicationHook::Round& round = exchanges_[bucket].round;
  if (round.finish) {
    const c10::OptionalStreamGuard guard(poll_stream_);
    const c10::AutoGradMode no_grad(false);
    if (round.work) round.work->wait();
    round.finish();
    round = {};
  }
  buckets_[bucket].range.reset();
}

// Does nothing while a CUDA graph is recorded. Only a backend with streams of its own can be recorded, and needs no
// polling.
void Reducer::poll() {
  if (open_.empty() || records()) return;
  std::erase_if(open_, [&](size_t bucket) {
    if (!is_complete(exchanges_[bucket]) || exchanges_[bucket].round.next) return false;
    end_of(bucket);
    return true;
  });
}

void Reducer::complete(bool /*partial*/) {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    CommunicationHook::Round& round = exchanges_[bucket].round;
    if (round.work && !round.finish) {
      // NCCL's work frees its tensors here. The tensors are of this stream, so let this stream wait.
      const c10::OptionalStreamGuard guard(in_rounds() ? poll_stream_ : std::nullopt);
      round.work->wait();
    }
    end_of(bucket);
    round = {};
  }
  if (in_rounds() && poll_stream_) queue_after(*poll_stream_, current_stream(rank_.device()));
  open_.clear();
  if (!by_grains()) return;
  leave_gradients();
  const std::string late = parameters_.unfrozen();
  if (late.empty()) return;
  throw Error(name() + ": " + late +
              " was unfrozen between the parts of a step by grains, so its gradients are not averaged. Call "
              "requires_grad_(true) between the steps");
}

void Reducer::abandon() {
  open_.clear();
  if (!queues_calls_) return;
  for (const auto& exchange : exchanges_) {
    const c10::OptionalStreamGuard guard(poll_stream_);
    wait_on_stream(exchange.round.work);
  }
  queue_after(*poll_stream_, current_stream(rank_.device()));
}

// ---- The order of the gradients.

void Reducer::follow(const std::vector<size_t>& order) {
  std::vector<size_t> all = order;
  std::vector<bool> used(slots_.size(), false);
  for (const size_t slot : all) used[slot] = true;
  for (size_t slot = slots_.size(); slot-- > 0;) {
    if (!used[slot]) all.push_back(slot);
  }
  make_buckets(all, order.size());
}

}  // namespace lockstep
