#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/pipeline/pipeline.hpp>

#include "base/classic.hpp"
#include "base/seconds_since.hpp"
#include "comm/arguments.hpp"
#include "data/part_weight.hpp"
#include "data/parts.hpp"
#include "data_parallel/counted_targets.hpp"
#include "data_parallel/replica.hpp"
#include "nn/name_dropouts.hpp"
#include "nn/random_layers.hpp"
#include "pipeline_checks.hpp"
#include "pipeline_mail.hpp"
#include "pipeline_shapes.hpp"
#include "pipeline_stage.hpp"
#include "pipeline_ties.hpp"
#include "ranks/gather.hpp"
#include "ranks/shared_seed.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace lockstep {

using comm::describe;

namespace {

using torch::nn::Sequential;
using Clock = std::chrono::steady_clock;
using Kind = PipelineStep::Kind;

// A grain's samples get memory of their own, since their place in memory must not change how they are computed.
at::Tensor samples_of(const at::Tensor& batch, const Range& part, bool is_grain) {
  const at::Tensor samples = batch.slice(0, part.begin, part.end);
  return is_grain ? samples.clone() : samples;
}

// The batch without x, for the criterion; only the first layer needs x.
Batch targets_of(const Batch& batch, const Range& part, bool is_grain) {
  Batch targets = batch;
  targets.x = at::Tensor();
  targets.y = samples_of(batch.y, part, is_grain);
  for (auto& [name, tensor] : targets.more) tensor = samples_of(tensor, part, is_grain);
  return targets;
}

Batch targets_on(Batch targets, const c10::Device& device) {
  targets.y = targets.y.to(device);
  for (auto& [name, tensor] : targets.more) tensor = tensor.to(device);
  return targets;
}

// By grains, each pipeline computes its grains alone, and a rank holds some layers.
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

class Pipeline::State {
 public:
  State(std::vector<Sequential> stages, Rank& rank, const PipelineOptions& options);

  at::Tensor forward_backward(const Batch& batch, const Criterion& criterion, const std::shared_ptr<Replica>& replica);
  at::Tensor forward(const at::Tensor& x);

  const Sequential& module() const { return module_; }
  const PipelineStats& stats() const { return stats_; }

 private:
  using Shapes = std::vector<SampleShape>;
  using TieGradients = std::vector<std::pair<int, at::Tensor>>;  // each with its tie's number

  // This rank's steps of a schedule, and their messages.
  struct Work {
    std::vector<PipelineStep> steps;
    PipelineMessages messages;
  };

  // A batch on its way through this rank's stages.
  struct Passage {
    const Batch& batch;
    const Criterion& criterion;
    const std::shared_ptr<Replica>& replica;  // null: there is none
    const std::vector<Range> microbatches;
    const at::Tensor loss;              // the mean over the microbatches so far
    std::map<int, int> backwards = {};  // how many backwards are done, by stage

    bool by_grains() const { return batch.grain > 0; }
    Range part(const PipelineStep& step) const { return microbatches[static_cast<size_t>(step.microbatch)]; }
    double share(const PipelineStep& step) const {
      return static_cast<double>(part(step).size()) / static_cast<double>(batch.size());
    }
  };

  const Shapes& shapes_for(const at::Tensor& x);
  const Work& work_for(int microbatches, bool backward);

  at::Tensor run(const Batch& batch, const Criterion& criterion, const std::shared_ptr<Replica>& replica,
                 const Shapes& shapes);
  at::Tensor forward(Passage& passage, const PipelineStep& step, const at::Tensor& received, bool backward_next);
  at::Tensor backward(Passage& passage, const PipelineStep& step, const at::Tensor& received, const TieGradients& ties);
  PipelineStage::Head head(const Passage& passage, const Range& part);
  int64_t grain_of(const Passage& passage, const PipelineStep& step) const;  // its number in the whole batch
  // The range of the batch's samples of each microbatch.
  static std::vector<Range> microbatches_of(int64_t samples, int64_t count);
  static std::vector<Range> grains_of(int64_t samples, int64_t grain);
  PipelineMail mail(const Work& work, const Shapes& shapes, const std::vector<Range>& microbatches);
  void check_output(const PipelineStage& stage, const at::Tensor& y, const SampleShape& expected) const;
  void check_memory(const PipelineStage& stage, const at::Tensor& y, const SampleShape& expected) const;
  PipelineStage& stage(int index) { return stages_[static_cast<size_t>(index / rank_.world_size())]; }
  bool is_last(int stage) const { return stage == count_ - 1; }
  int last_rank() const { return rank_.world_size() - 1; }
  bool on_gpu() const { return !rank_.device().is_cpu(); }
  SampleScope::Place place_of_part(const Range& part) const;
  void timed(const std::function<void()>& compute);

  Rank rank_;
  const PipelineOptions options_;
  const int count_;                    // the number of stages, over all ranks
  std::vector<PipelineStage> stages_;  // this rank's stages, ascending
  Sequential module_;
  std::optional<PipelineTies> ties_;
  std::set<std::pair<std::string, int64_t>> compared_;  // shapes and sizes of batches that all ranks had
  std::map<std::string, Shapes> shapes_;                // shapes by that of a sample that goes in
  std::map<std::pair<int, bool>, Work> work_;
  SampleScope::Place place_;
  int64_t steps_done_ = 0;  // counted here only without a replica, which counts its own steps
  int64_t inputs_ = 0;      // how many batches were trained
  int64_t outputs_ = 0;     // how many calls of forward there were
  int checked_ = 0;         // how many batches' marks were compared
  PipelineStats stats_;
};

// ---- Making it.

Pipeline::State::State(std::vector<Sequential> stages, Rank& rank, const PipelineOptions& options)
    : rank_(rank), options_(options), count_(static_cast<int>(stages.size())) {
  check_stages(stages, rank_, options_);
  for (int index = rank_.index(); index < count_; index += rank_.world_size()) {
    auto& layers = stages[static_cast<size_t>(index)];
    layers->to(rank_.device());
    stages_.emplace_back(index, layers);
    const auto children = layers->named_children();
    for (size_t i = 0; i < children.size(); ++i) {
      if (module_->named_children().contains(children[i].key())) {
        throw Error("Pipeline: two layers of rank " + std::to_string(rank_.index()) + " are named " +
                    children[i].key() + "; split_into_stages gives stages whose layers have the net's names");
      }
      module_->push_back(children[i].key(), *(layers->begin() + static_cast<ptrdiff_t>(i)));
    }
  }
  name_dropouts(*module_);
  warn_of_shared_draws(rank_, "Pipeline", first_random_layer(*module_));
  const auto with_parameters = std::find_if(stages_.begin(), stages_.end(),
                                            [](const auto& stage) { return !stage.layers()->parameters().empty(); });
  const int first =
      compare_options(rank_, count_, options_, with_parameters == stages_.end() ? count_ : with_parameters->index());
  for (auto& stage : stages_) stage.set_needs_input_gradient(stage.index() > first);
  ties_.emplace(stages_, rank_);
}

// ---- Before a batch.

const Pipeline::State::Shapes& Pipeline::State::shapes_for(const at::Tensor& x) {
  if (!x.defined() || x.dim() == 0) throw Error("Pipeline: a batch's x needs a first dimension, the samples");
  const SampleShape input = sample_shape(x);
  std::string key = input.text();
  if (input.format == at::MemoryFormat::ChannelsLast) key += " in channels-last";
  const auto device = rank_.device().type();
  if (at::autocast::is_autocast_enabled(device)) {  // then other types go between stages
    key += std::string(" in ") + c10::toString(at::autocast::get_autocast_dtype(device));
  }
  if (compared_.count({key, x.size(0)}) == 0) {
    compare_batches(rank_, key, x.size(0));
    compared_.emplace(key, x.size(0));
  }
  const auto found = shapes_.find(key);
  if (found != shapes_.end()) return found->second;
  return shapes_[key] = dry_run_shapes(rank_, stages_, count_, input);
}

const Pipeline::State::Work& Pipeline::State::work_for(int microbatches, bool backward) {
  const auto [found, is_new] = work_.try_emplace({microbatches, backward});
  if (!is_new) return found->second;
  const int ranks = rank_.world_size();
  std::vector<std::vector<PipelineStep>> steps;
  for (int rank = 0; rank < ranks; ++rank) {
    steps.push_back(steps_of(options_.schedule, rank, ranks, count_ / ranks, microbatches));
    if (!backward) std::erase_if(steps.back(), [](const auto& step) { return step.kind == Kind::backward; });
  }
  found->second = {steps[static_cast<size_t>(rank_.index())],
                   messages_of(rank_.index(), steps, count_, backward ? ties_->ties() : std::vector<PipelineTie>())};
  return found->second;
}

std::vector<Range> Pipeline::State::microbatches_of(int64_t samples, int64_t count) {
  const int microbatches = static_cast<int>(std::min(samples, count));
  std::vector<Range> parts;
  for (int i = 0; i < microbatches; ++i) parts.push_back(part_of(samples, i, microbatches));
  return parts;
}

std::vector<Range> Pipeline::State::grains_of(int64_t samples, int64_t grain) {
  std::vector<Range> parts;
  for (int64_t begin = 0; begin < samples; begin += grain) parts.push_back({begin, std::min(begin + grain, samples)});
  return parts;
}

// An activation that a step needs has its stage's input shape. A gradient has its stage's output shape.
PipelineMail Pipeline::State::mail(const Work& work, const Shapes& shapes, const std::vector<Range>& microbatches) {
  const auto empty = [this, &shapes, &work, &microbatches, device = rank_.device()](const PipelineMessage& message) {
    if (message.tie >= 0) return ties_->empty_gradient(message.tie);
    const auto& step = work.steps[static_cast<size_t>(message.step)];
    const auto& shape = shapes[static_cast<size_t>(step.stage) + (step.kind == Kind::forward ? 0 : 1)];
    return shape.empty(microbatches[static_cast<size_t>(step.microbatch)].size(), device);
  };
  return {rank_, work.messages, empty, /*in_order=*/on_gpu()};
}

// ---- A batch.

at::Tensor Pipeline::State::forward_backward(const Batch& batch, const Criterion& criterion,
                                             const std::shared_ptr<Replica>& replica) {
  const auto start = Clock::now();
  stats_ = {};
  warn_of_shared_seed(rank_);
  if (!batch.y.defined() || batch.y.dim() == 0 || !batch.x.defined() || batch.x.dim() == 0 ||
      batch.x.size(0) != batch.y.size(0)) {
    throw Error("Pipeline: a batch needs x and y with as many samples; x is " +
                (batch.x.defined() ? describe(batch.x) : "undefined") + ", y is " +
                (batch.y.defined() ? describe(batch.y) : "undefined"));
  }
  if (!replica && batch.grain > 0) {
    throw Error(rank_.name() +
                ": Pipeline: the batch has a grain, whose gradients a DataParallel adds up. Give forward_backward a "
                "DataParallel of module() over a group of one rank, or take a SplitModel");
  }
  if (!replica && batch.global_size != batch.size() && batch.global_size != 0) {
    throw Error(rank_.name() + ": Pipeline: the batch is a part, " + std::to_string(batch.size()) + " of " +
                std::to_string(batch.global_size) +
                " samples, but all ranks of a pipeline need the whole one. Call batches(…) without the rank; to split "
                "batches over several pipelines, give batches(…) a mesh's data axis, and forward_backward a "
                "DataParallel of module() over it");
  }
  const Shapes& shapes = shapes_for(batch.x);
  compare_inputs(rank_, batch.x, ++inputs_);
  at::Tensor loss = at::zeros({}, at::TensorOptions(rank_.device()).dtype(at::kDouble));
  const auto compute = [&] {
    if (batch.size() > 0) loss = run(batch, criterion, replica, shapes);
  };
  const PartSizes sizes{
      .local = batch.size(), .global = batch.global_size, .mark = batch.mark, .by_grains = batch.grain > 0};
  place_ = replica ? replica->places().of(batch)
                   : SampleScope::Place{.seed = rank_.seed(), .step = steps_done_++, .first = 0, .size = batch.size()};
  if (!replica) {
    compute();
  } else if (batch.grain > 0) {
    refuse_what_needs_all_layers(*replica);
    replica->backwards().run_by_grains(compute, replica->grains().checked(batch).runs, sizes);
  } else {
    replica->backwards().run(compute, sizes);
  }
  if (on_gpu() && !options_.measure) stats_.computing = std::numeric_limits<double>::quiet_NaN();
  stats_.seconds = seconds_since(start);
  return loss;
}

at::Tensor Pipeline::State::run(const Batch& batch, const Criterion& criterion, const std::shared_ptr<Replica>& replica,
                                const Shapes& shapes) {
  const at::Tensor loss_and_mark = at::zeros({2}, at::TensorOptions(rank_.device()).dtype(at::kDouble));
  loss_and_mark[1].fill_(batch.mark);
  Passage passage{
      batch, criterion, replica,
      batch.grain > 0 ? grains_of(batch.size(), batch.grain) : microbatches_of(batch.size(), options_.microbatches),
      loss_and_mark[0]};
  const Work& work = work_for(static_cast<int>(passage.microbatches.size()), /*backward=*/true);
  ties_->refresh();
  PipelineMail mail = this->mail(work, shapes, passage.microbatches);
  Announcement announcement(rank_, last_rank(), /*count=*/2, /*early=*/!on_gpu());

  for (size_t i = 0; i < work.steps.size(); ++i) {
    const auto& step = work.steps[i];
    const auto number = static_cast<int>(i);
    const bool is_forward = step.kind == Kind::forward;
    const SampleScope scope(place_of_part(passage.part(step)));  // for backward too, which may compute forward again
    const at::Tensor received = mail.take(number);
    const bool backward_next =
        i + 1 < work.steps.size() && work.steps[i + 1] == PipelineStep{Kind::backward, step.microbatch, step.stage};
    const at::Tensor made = is_forward ? forward(passage, step, received, backward_next)
                                       : backward(passage, step, received, mail.take_ties(number));
    const TieGradients ties = is_forward ? TieGradients() : ties_->take_gradients(step.stage);
    if (is_forward ? is_last(step.stage) : step.stage == 0) continue;
    const auto& shape = shapes[static_cast<size_t>(step.stage) + (is_forward ? 1 : 0)];
    if (is_forward) check_output(stage(step.stage), made, shape);
    if (is_forward && passage.by_grains()) check_memory(stage(step.stage), made, shape);
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
at::Tensor Pipeline::State::forward(Passage& passage, const PipelineStep& step, const at::Tensor& received,
                                    bool backward_next) {
  const Range part = passage.part(step);
  const PipelineStage::Head loss_of = is_last(step.stage) ? head(passage, part) : PipelineStage::Head();
  at::Tensor made;
  timed([&] {
    const bool by_grains = passage.by_grains();
    const at::Tensor x = step.stage == 0 ? samples_of(passage.batch.x, part, by_grains).to(rank_.device()) : received;
    const auto forward = [&] {
      made = stage(step.stage).forward(step.microbatch, x, loss_of, !options_.recompute || backward_next);
    };
    by_grains ? passage.replica->grains().forward(grain_of(passage, step), forward) : forward();
    if (!is_last(step.stage)) return;
    if (made.numel() != 1) {
      throw Error("Pipeline: the criterion gives " + describe(made) +
                  ", and must give one number, the mean over the samples");
    }
    passage.loss.add_(made.reshape({}), passage.share(step));
  });
  return made;
}

// The loss of a microbatch, behind the last stage.
PipelineStage::Head Pipeline::State::head(const Passage& passage, const Range& part) {
  const Batch& batch = passage.batch;
  const int64_t whole = batch.global_size > 0 ? batch.global_size : batch.size();
  const bool looks = part.size() < whole && (!on_gpu() || checked_ < kChecksOnGpu);
  return [this, &criterion = passage.criterion, targets = targets_of(batch, part, passage.by_grains()), looks,
          size = part.size()](const at::Tensor& output) {
    at::Tensor mean = criterion(output, targets_on(targets, rank_.device()));
    if (looks) check_counted_targets(mean, size, rank_.name() + ": Pipeline");  // it looks at the graph of `mean`
    return mean;
  };
}

at::Tensor Pipeline::State::backward(Passage& passage, const PipelineStep& step, const at::Tensor& received,
                                     const TieGradients& ties) {
  const auto& replica = passage.replica;
  const bool by_grains = passage.by_grains();
  // Only the last microbatch's backward completes the stage's gradients.
  std::optional<NoSync> not_yet;
  const bool more_to_come = ++passage.backwards[step.stage] < static_cast<int>(passage.microbatches.size());
  if (replica && !by_grains && more_to_come) not_yet.emplace(replica);
  const auto lent = ties_->roots(ties);
  at::Tensor made;
  timed([&] {
    const Range part = passage.part(step);
    const double weight =
        by_grains ? static_cast<double>(part.size())
        : replica ? part_weight(part.size(), passage.batch.global_size, replica->rank().world_size(), "DataParallel")
                  : passage.share(step);
    const auto backward = [&] { made = stage(step.stage).backward(step.microbatch, received, weight, lent); };
    by_grains ? replica->grains().backward(grain_of(passage, step), backward) : backward();
  });
  return made;
}

int64_t Pipeline::State::grain_of(const Passage& passage, const PipelineStep& step) const {
  return place_.first / passage.batch.grain + step.microbatch;
}

void Pipeline::State::check_output(const PipelineStage& stage, const at::Tensor& y, const SampleShape& expected) const {
  if (y.dim() > 0 && y.scalar_type() == expected.type && y.sizes().slice(1) == at::IntArrayRef(expected.sizes)) return;
  throw Error("Pipeline: stage " + std::to_string(stage.index()) + " gives " + describe(y) + ", and gave " +
              expected.text() + " for zeros in eval mode; a stage's output must have one shape");
}

// After a cut the output would have memory of its own, and some kernels round by where and how their input lies.
void Pipeline::State::check_memory(const PipelineStage& stage, const at::Tensor& y, const SampleShape& expected) const {
  constexpr std::uintptr_t kLine = 64;  // the bytes to which LibTorch aligns its memory
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(y.const_data_ptr()) % kLine == 0;
  if (y.numel() == 0 || (is_aligned && y.is_contiguous(expected.format))) return;
  throw Error(
      "Pipeline: stage " + std::to_string(stage.index()) + " gives a view of a larger tensor, or of one that " +
      "lies otherwise: " + describe(y) + " with strides " + classic_text(y.strides()) +
      ". With a grain the cut must change no bit, and behind it these values would lie elsewhere in memory. Let "
      "the stage's last layer give a tensor of its own, as by clone(at::MemoryFormat::Contiguous), or cut "
      "elsewhere");
}

SampleScope::Place Pipeline::State::place_of_part(const Range& part) const {
  SampleScope::Place place = place_;
  if (place.first >= 0) place.first += part.begin;
  place.size = part.size();
  return place;
}

void Pipeline::State::timed(const std::function<void()>& compute) {
  const bool wait = on_gpu() && options_.measure;
  if (wait) synchronize(rank_.device());
  const auto start = Clock::now();
  compute();
  if (wait) synchronize(rank_.device());
  stats_.computing += seconds_since(start);
}

at::Tensor Pipeline::State::forward(const at::Tensor& x) {
  const c10::NoGradGuard no_grad;
  const Shapes& shapes = shapes_for(x);
  compare_inputs(rank_, x, ++outputs_);
  const int64_t samples = x.size(0);
  at::Tensor result = shapes.back().empty(samples, rank_.device());
  if (samples == 0) return result;
  const auto microbatches = microbatches_of(samples, options_.microbatches);
  const Work& work = work_for(static_cast<int>(microbatches.size()), /*backward=*/false);
  ties_->refresh();
  PipelineMail mail = this->mail(work, shapes, microbatches);
  for (size_t i = 0; i < work.steps.size(); ++i) {
    const auto& step = work.steps[i];
    const Range part = microbatches[static_cast<size_t>(step.microbatch)];
    const at::Tensor received = mail.take(static_cast<int>(i));
    PipelineStage& stage = this->stage(step.stage);
    const at::Tensor y =
        stage.through(step.stage == 0 ? x.slice(0, part.begin, part.end).to(rank_.device()) : received);
    check_output(stage, y, shapes[static_cast<size_t>(step.stage) + 1]);
    if (is_last(step.stage)) {
      result.slice(0, part.begin, part.end).copy_(y);
    } else {
      mail.give(static_cast<int>(i), y.contiguous(shapes[static_cast<size_t>(step.stage) + 1].format));
    }
  }
  mail.finish();
  rank_.broadcast(result, last_rank());
  return result;
}

// ---- The public class.

Pipeline::Pipeline(std::vector<Sequential> stages, Rank& rank, const PipelineOptions& options)
    : state_(std::make_shared<State>(std::move(stages), rank, options)) {}

Sequential Pipeline::module() const {
  return state_->module();
}

at::Tensor Pipeline::forward_backward(const Batch& batch, const Criterion& criterion) {
  return state_->forward_backward(batch, criterion, nullptr);
}

at::Tensor Pipeline::forward_backward(const Batch& batch, const Criterion& criterion, Replicas& replicas) {
  return state_->forward_backward(batch, criterion, replicas.replica());
}

at::Tensor Pipeline::forward(const at::Tensor& x) {
  return state_->forward(x);
}

PipelineStats Pipeline::stats() const {
  return state_->stats();
}

}  // namespace lockstep
