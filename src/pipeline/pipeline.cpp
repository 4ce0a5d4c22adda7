#include "pipeline.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "comm/arguments.hpp"
#include "data/part_weight.hpp"
#include "data_parallel/counted_targets.hpp"
#include "data_parallel/replica.hpp"
#include "nn/random_layers.hpp"
#include "pipeline_checks.hpp"
#include "ranks/gather.hpp"
#include "ranks/shared_generator.hpp"

#include <algorithm>

namespace lockstep {

using comm::describe;

namespace {

using torch::nn::Sequential;
using Kind = PipelineStep::Kind;

// A grain's samples get memory of their own, since the place in memory must not change the results.
at::Tensor samples_of(const at::Tensor& batch, const Range& range, bool is_grain) {
  const at::Tensor samples = batch.slice(0, range.begin, range.end);
  return is_grain ? samples.clone() : samples;
}

// Returns the batch without x, for the criterion; only the first layer needs x.
Batch targets_of(const Batch& batch, const Range& range, bool is_grain, const c10::Device& device) {
  Batch targets = batch;
  targets.x = at::Tensor();
  targets.y = samples_of(batch.y, range, is_grain).to(device);
  for (auto& [name, tensor] : targets.more) tensor = samples_of(tensor, range, is_grain).to(device);
  return targets;
}

std::vector<Range> grains_of(int64_t samples, int64_t grain) {
  std::vector<Range> ranges;
  for (int64_t begin = 0; begin < samples; begin += grain) ranges.push_back({begin, std::min(begin + grain, samples)});
  return ranges;
}

// Refuses what needs all layers: by grains each pipeline computes its grains alone, and a rank holds some layers.
void refuse_what_needs_all_layers(Replica& replica) {
  const auto refuse = [&](const std::string& why) { throw Error(replica.rank().name() + ": DataParallel: " + why); };
  if (replica.divides_parameters()) {
    refuse(
        "with a grain and Sharded::parameters all ranks must compute the layers equally often, and a pipeline computes "
        "each rank's grains alone. Take Sharded::state or Sharded::gradients, or no pipeline");
  }
  if (replica.grains().check() != nullptr) {
    refuse(
        "a grain_check has a grain computed again by a rank that holds all layers, and here each rank holds some. "
        "Leave out the check, or the pipeline");
  }
}

}  // namespace

// ---- Making it.

Pipeline::Pipeline(const std::vector<Sequential>& stages, Rank& rank, const ModelSplit& split)
    : rank_(rank), split_(split) {
  for (int index = rank_.index(); index < split_.stages(); index += rank_.world_size()) {
    Sequential layers = stages[static_cast<size_t>(index)];
    check_stage(*layers, index);
    layers->to(rank_.device());
    stages_.emplace_back(index, layers);
    size_t layer = 0;
    for (const auto& child : layers->named_children()) {
      module_->push_back(child.key(), *(layers->begin() + static_cast<ptrdiff_t>(layer++)));
    }
  }
  name_dropouts(*module_);
  warn_of_shared_draws(rank_, "Pipeline", first_random_layer(*module_));
  compare_splits(rank_, split_);
  const auto trained = std::find_if(stages_.begin(), stages_.end(),
                                    [](const auto& stage) { return !stage.layers()->parameters().empty(); });
  const int64_t first_here = trained == stages_.end() ? split_.stages() : trained->index();
  const auto first = of_all_ranks(rank_, {first_here}).min().item<int64_t>();
  for (auto& stage : stages_) stage.set_needs_input_gradient(stage.index() > first);
  ties_.emplace(stages_, rank_);
}

// ---- Before a batch.

const Pipeline::Shapes& Pipeline::shapes_for(const at::Tensor& x) {
  if (!x.defined() || x.dim() == 0) throw Error("Pipeline: a batch's x needs a first dimension, the samples");
  const SampleShape input = sample_shape(x);
  std::string key = input.text();
  if (input.format == at::MemoryFormat::ChannelsLast) key += " in channels-last";
  const auto device = rank_.device().type();
  if (at::autocast::is_autocast_enabled(device)) {  // other types go between stages then
    key += std::string(" in ") + c10::toString(at::autocast::get_autocast_dtype(device));
  }
  if (compared_.count({key, x.size(0)}) == 0) {
    compare_batches(rank_, key, x.size(0));
    compared_.emplace(key, x.size(0));
  }
  const auto found = shapes_.find(key);
  if (found != shapes_.end()) return found->second;
  return shapes_[key] = dry_run_shapes(rank_, stages_, split_.stages(), input);
}

const Pipeline::Work& Pipeline::work_for(int microbatches, bool backward) {
  const auto [found, is_new] = work_.try_emplace({microbatches, backward});
  if (!is_new) return found->second;
  const int ranks = rank_.world_size();
  std::vector<std::vector<PipelineStep>> steps;
  for (int rank = 0; rank < ranks; ++rank) {
    steps.push_back(steps_of(split_.schedule, rank, ranks, split_.stages_per_rank, microbatches));
    if (!backward) std::erase_if(steps.back(), [](const auto& step) { return step.kind == Kind::backward; });
  }
  const auto ties = backward ? ties_->ties() : std::vector<PipelineTie>();
  found->second = {steps[static_cast<size_t>(rank_.index())], messages_of(rank_.index(), steps, split_.stages(), ties)};
  return found->second;
}

// A batch with fewer samples than microbatches is cut into single samples.
std::vector<Range> Pipeline::microbatches_of(int64_t samples) const {
  const auto microbatches = static_cast<int>(std::min<int64_t>(samples, split_.microbatches));
  std::vector<Range> ranges;
  for (int i = 0; i < microbatches; ++i) ranges.push_back(part_of(samples, i, microbatches));
  return ranges;
}

// An activation that a step needs has its stage's input shape. A gradient has its stage's output shape.
PipelineMail Pipeline::mail(const Work& work, const Shapes& shapes, const std::vector<Range>& microbatches) {
  const auto empty = [this, &shapes, &work, &microbatches, device = rank_.device()](const PipelineMessage& message) {
    if (message.tie >= 0) return ties_->empty_gradient(message.tie);
    const auto& step = work.steps[static_cast<size_t>(message.step)];
    const auto& shape = shapes[static_cast<size_t>(step.stage) + (step.kind == Kind::forward ? 0 : 1)];
    return shape.empty(microbatches[static_cast<size_t>(step.microbatch)].size(), device);
  };
  return {rank_, work.messages, empty, /*in_order=*/on_gpu()};
}

// ---- A batch.

at::Tensor Pipeline::forward_backward(const Batch& batch, const Criterion& criterion,
                                      const std::shared_ptr<Replica>& replica) {
  warn_of_shared_seed(rank_);
  if (!batch.y.defined() || batch.y.dim() == 0 || !batch.x.defined() || batch.x.dim() == 0 ||
      batch.x.size(0) != batch.y.size(0)) {
    throw Error("Pipeline: a batch needs x and y with as many samples; x is " +
                (batch.x.defined() ? describe(batch.x) : "undefined") + ", y is " +
                (batch.y.defined() ? describe(batch.y) : "undefined"));
  }
  const Shapes& shapes = shapes_for(batch.x);
  compare_inputs(rank_, batch.x, ++inputs_);
  at::Tensor loss = at::zeros({}, at::TensorOptions(rank_.device()).dtype(at::kDouble));
  const auto compute = [&] {
    if (batch.size() > 0) loss = run(batch, criterion, replica, shapes);
  };
  const PartSizes sizes{
      .local = batch.size(), .global = batch.global_size, .mark = batch.mark, .by_grains = batch.grain > 0};
  place_ = replica->places().of(batch);
  if (batch.grain > 0) {
    refuse_what_needs_all_layers(*replica);
    replica->backwards().run(compute, sizes, replica->grains().checked(batch).runs);
  } else {
    replica->backwards().run(compute, sizes);
  }
  return loss;
}

at::Tensor Pipeline::run(const Batch& batch, const Criterion& criterion, const std::shared_ptr<Replica>& replica,
                         const Shapes& shapes) {
  const at::Tensor loss_and_mark = at::zeros({2}, at::TensorOptions(rank_.device()).dtype(at::kDouble));
  loss_and_mark[1].fill_(batch.mark);
  Passage passage{batch, criterion, replica,
                  batch.grain > 0 ? grains_of(batch.size(), batch.grain) : microbatches_of(batch.size()),
                  loss_and_mark[0]};
  const Work& work = work_for(static_cast<int>(passage.microbatches.size()), /*backward=*/true);
  ties_->refresh();
  PipelineMail mail = this->mail(work, shapes, passage.microbatches);
  Announcement announcement(rank_, last_rank(), /*count=*/2, /*early=*/!on_gpu());

  for (size_t i = 0; i < work.steps.size(); ++i) {
    const auto& step = work.steps[i];
    const auto number = static_cast<int>(i);
    const bool is_forward = step.kind == Kind::forward;
    const SampleScope scope(place_of(passage.range(step)));  // it lasts for backward, which may compute forward again
    const at::Tensor received = mail.take(number);
    const bool backward_next =
        i + 1 < work.steps.size() && work.steps[i + 1] == PipelineStep{Kind::backward, step.microbatch, step.stage};
    const at::Tensor made = is_forward ? forward(passage, step, received, backward_next)
                                       : backward(passage, step, received, mail.take_ties(number));
    const TieGradients ties = is_forward ? TieGradients() : ties_->take_gradients(step.stage);
    if (is_forward ? is_last(step.stage) : step.stage == 0) continue;
    const auto& shape = shapes[static_cast<size_t>(step.stage) + (is_forward ? 1 : 0)];
    if (is_forward) check_output(step.stage, made, shape);
    if (is_forward && passage.by_grains()) check_memory(step.stage, made, shape);
    // Tensors between stages lie in memory as they do without a cut, so that the next stage takes the same kernels.
    mail.give(number, made.contiguous(shape.format));
    for (const auto& [tie, gradient] : ties) mail.give_tie(number, tie, gradient);
  }
  mail.finish();
  const at::Tensor announced = announcement.exchange(loss_and_mark);
  if (!on_gpu() || checked_ < kChecksOnGpu) {
    ++checked_;
    check_mark(rank_, batch.mark, announced[1].item<int32_t>());
  }
  return announced[0];
}

// A backward that follows at once saves no memory by computing forward again, so the graph is kept.
at::Tensor Pipeline::forward(Passage& passage, const PipelineStep& step, const at::Tensor& received,
                             bool backward_next) {
  const Range range = passage.range(step);
  const bool by_grains = passage.by_grains();
  const PipelineStage::Head loss_of = is_last(step.stage) ? head(passage, range) : PipelineStage::Head();
  const at::Tensor x = step.stage == 0 ? samples_of(passage.batch.x, range, by_grains).to(rank_.device()) : received;
  at::Tensor made;
  const auto compute = [&] {
    made = stage(step.stage).forward(step.microbatch, x, loss_of, !split_.recompute || backward_next);
  };
  by_grains ? passage.replica->grains().forward(grain_of(passage, step), compute) : compute();
  if (!is_last(step.stage)) return made;
  if (made.numel() != 1) {
    throw Error("Pipeline: the criterion gives " + describe(made) +
                ", and must give one number, the mean over the samples");
  }
  passage.loss.add_(made.reshape({}), static_cast<double>(range.size()) / static_cast<double>(passage.batch.size()));
  return made;
}

// Makes the loss of a microbatch, behind the last stage.
PipelineStage::Head Pipeline::head(const Passage& passage, const Range& range) {
  const Batch& batch = passage.batch;
  const int64_t whole = batch.global_size > 0 ? batch.global_size : batch.size();
  const bool looks = range.size() < whole && (!on_gpu() || checked_ < kChecksOnGpu);
  return [this, &criterion = passage.criterion, &check = passage.replica->criteria(),
          targets = targets_of(batch, range, passage.by_grains(), rank_.device()), looks,
          size = range.size()](const at::Tensor& output) {
    at::Tensor mean = check.loss(criterion, output, targets);
    if (looks) check_counted_targets(mean, size, rank_.name() + ": Pipeline");  // it looks at the graph of `mean`
    return mean;
  };
}

at::Tensor Pipeline::backward(Passage& passage, const PipelineStep& step, const at::Tensor& received,
                              const TieGradients& ties) {
  const auto& replica = passage.replica;
  const Range range = passage.range(step);
  const bool by_grains = passage.by_grains();
  // Only the last microbatch's backward completes the stage's gradients.
  std::optional<NoSync> not_yet;
  const bool more_to_come = ++passage.backwards[step.stage] < static_cast<int>(passage.microbatches.size());
  if (!by_grains && more_to_come) not_yet.emplace(replica);
  const double weight =
      by_grains ? static_cast<double>(range.size())
                : part_weight(range.size(), passage.batch.global_size, replica->rank().world_size(), "DataParallel");
  const auto lent = ties_->roots(ties);
  at::Tensor made;
  const auto compute = [&] { made = stage(step.stage).backward(step.microbatch, received, weight, lent); };
  by_grains ? replica->grains().backward(grain_of(passage, step), compute) : compute();
  return made;
}

int64_t Pipeline::grain_of(const Passage& passage, const PipelineStep& step) const {
  return place_.first / passage.batch.grain + step.microbatch;
}

SampleScope::Place Pipeline::place_of(const Range& range) const {
  SampleScope::Place place = place_;
  if (place.first >= 0) place.first += range.begin;
  place.size = range.size();
  return place;
}

at::Tensor Pipeline::forward(const at::Tensor& x) {
  const c10::NoGradGuard no_grad;
  const Shapes& shapes = shapes_for(x);
  compare_inputs(rank_, x, ++outputs_);
  const int64_t samples = x.size(0);
  at::Tensor result = shapes.back().empty(samples, rank_.device());
  if (samples == 0) return result;
  const auto microbatches = microbatches_of(samples);
  const Work& work = work_for(static_cast<int>(microbatches.size()), /*backward=*/false);
  ties_->refresh();
  PipelineMail mail = this->mail(work, shapes, microbatches);
  for (size_t i = 0; i < work.steps.size(); ++i) {
    const auto& step = work.steps[i];
    const Range range = microbatches[static_cast<size_t>(step.microbatch)];
    const at::Tensor received = mail.take(static_cast<int>(i));
    const SampleShape& output = shapes[static_cast<size_t>(step.stage) + 1];
    const at::Tensor y =
        stage(step.stage).through(step.stage == 0 ? x.slice(0, range.begin, range.end).to(rank_.device()) : received);
    check_output(step.stage, y, output);
    if (is_last(step.stage)) {
      result.slice(0, range.begin, range.end).copy_(y);
    } else {
      mail.give(static_cast<int>(i), y.contiguous(output.format));
    }
  }
  mail.finish();
  rank_.broadcast(result, last_rank());
  return result;
}

}  // namespace lockstep
