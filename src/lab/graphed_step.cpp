#include "graphed_step.hpp"

#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/exception_text.hpp"
#include "data/batch_tensors.hpp"
#include "data/sizes_text.hpp"
#include "nn/recorded_draws.hpp"
#include "ranks/rank_wait.hpp"

namespace lockstep {

bool can_record_exchange(Rank& rank) {
  return rank.backend().getBackendName() == "nccl";
}

GraphedStep::GraphedStep(Rank& rank, std::unique_ptr<Graph> graph, int64_t full_size, bool collective,
                         std::function<void(const Batch&)> step, std::shared_ptr<RowNumbers> numbers,
                         at::MemoryFormat format)
    : rank_(rank),
      graph_(std::move(graph)),
      full_size_(full_size),
      collective_(collective),
      step_(std::move(step)),
      numbers_(std::move(numbers)),
      format_(format),
      step_number_(at::zeros({}, at::TensorOptions(rank.device()).dtype(at::kLong))) {}

bool GraphedStep::replay(const Batch& batch, int64_t number, const std::function<void()>& before) {
  if (batch.global_size != full_size_) return false;
  if (warm_up_left_ > 0) {
    --warm_up_left_;
    return false;
  }
  if (!failure_.empty()) throw Error(failure_);
  before();
  if (!input_.x.defined()) {
    record(batch);
  } else if (!gathers()) {
    take(batch);
  }
  if (draws_) step_number_.fill_(number);
  graph_->replay();
  stay_near();
  return true;
}

void GraphedStep::take(const Batch& batch) {
  check(batch);
  input_.x.copy_(batch.x, /*non_blocking=*/true);
  input_.y.copy_(batch.y, /*non_blocking=*/true);
  for (auto& [name, tensor] : input_.more) tensor.copy_(batch[name], /*non_blocking=*/true);
}

// A copy would repeat a tensor of fewer values, and convert one of another type.
void GraphedStep::check(const Batch& batch) const {
  const auto text = [](const Batch& of) {
    std::string all = "x " + sizes_text(of.x) + " " + c10::toString(of.x.scalar_type()) + ", y " + sizes_text(of.y) +
                      " " + c10::toString(of.y.scalar_type());
    for (const auto& [name, tensor] : of.more)
      all += ", " + name + " " + sizes_text(tensor) + " " + c10::toString(tensor.scalar_type());
    return all + (of.grain > 0 ? ", a grain of " + std::to_string(of.grain) : "");
  };
  const auto is_like = [](const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
  };
  const auto are_like = [&](const auto& a, const auto& b) { return a.first == b.first && is_like(a.second, b.second); };
  if (is_like(batch.x, input_.x) && is_like(batch.y, input_.y) && batch.grain == input_.grain &&
      batch.runs == input_.runs &&
      std::equal(batch.more.begin(), batch.more.end(), input_.more.begin(), input_.more.end(), are_like))
    return;
  throw Error(rank_.name() + ": a recorded step takes batches like the one that was recorded, which had " +
              text(input_) + ", and this one has " + text(batch) +
              ". Give samples of one shape, as by padding, or compute steps without a graph");
}

void GraphedStep::stay_near() {
  if (rank_.device().is_cpu()) return;
  ends_.push_back(end_of_stream(rank_.device()));
  if (ends_.size() <= kReplaysAhead) return;
  wait_for(rank_, ends_.front());
  ends_.pop_front();
}

void GraphedStep::record(const Batch& batch) {
  input_ = with_each_tensor(batch, [](const at::Tensor& tensor) { return tensor.clone(); });
  const auto work = [this] {
    if (gathers()) {
      input_ = numbers_->gather(input_);
      input_.x = input_.x.contiguous(format_);
    }
    const RecordedDraws draws(step_number_);
    step_(input_);
    draws_ = draws.any();
  };
  const auto record_now = [&] {
    try {
      synchronize(rank_);
      graph_->record(work);
    } catch (...) {
      failure_ =
          "rank " + std::to_string(rank_.index()) + " (" + rank_.device().str() +
          "): the training step cannot be recorded as a CUDA graph: " + exception_text(std::current_exception()) +
          ". Without `cuda_graph` or Recorded it is queued kernel by kernel";
      std::throw_with_nested(Error(failure_, data_of(std::current_exception())));
    }
    return true;
  };
  if (collective_) {
    record_now();
  } else {
    rank_.barrier();  // then nobody waits for a GPU, which is forbidden while one of its streams records
    rank_.in_turn(record_now);
  }
  if (gathers()) numbers_->stand_in_by(input_);
}

}  // namespace lockstep
