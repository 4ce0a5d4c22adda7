#include "step.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/nn/sample_scope.hpp>

#include "base/exception_text.hpp"
#include "batch_settings.hpp"
#include "data_parallel/replica.hpp"
#include "lab/graphed_step.hpp"
#include "measures.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

// Spoiling gives its argument. Its gradient becomes NaN if the argument is not finite, by one kernel of backward.
struct Spoiling : torch::autograd::Function<Spoiling> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& loss) {
    context->saved_data["loss"] = loss.detach();
    return loss.view_as(loss);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {torch::add(gradients[0], context->saved_data["loss"].toTensor(), /*alpha=*/0)};
  }
};

// Makes the gradients of a loss that is not finite not finite either. A CPU's loss can be looked at.
torch::Tensor spoiling_unless_finite(const torch::Tensor& loss) {
  if (!loss.is_cpu()) return Spoiling::apply(loss);
  return std::isfinite(loss.item<double>()) ? loss : loss * std::numeric_limits<double>::quiet_NaN();
}

// Call it while an exception is handled: LibTorch says that types differ, but does not name the tensors.
void explain_types(const StepParts& with, const Batch& batch) {
  const std::string said = exception_text(std::current_exception());
  if (said.find("type") == std::string::npos || !batch.x.defined()) return;
  const auto type = batch.x.scalar_type();
  const auto parameters = with.update.part()->module().parameters();
  const auto other = std::find_if(parameters.begin(), parameters.end(), [&](const torch::Tensor& parameter) {
    return parameter.is_floating_point() && parameter.scalar_type() != type;
  });
  const bool are_values = at::isFloatingType(type) || type == torch::kByte;  // other integers may be tokens
  if (!are_values || other == parameters.end()) return;
  const Samples& train = with.task.train;
  const bool were_bytes = train.in_memory() && train.tensors().x.scalar_type() == torch::kByte;
  const std::string wanted = c10::toString(other->scalar_type());
  std::throw_with_nested(
      Error(with.rank.name() + ": \"" + with.task.name + "\": the network has parameters of type " + wanted +
                ", and x of a batch is of type " + c10::toString(type) +
                (were_bytes ? " (images of bytes become Float from 0 to 1)" : "") +
                ". Give samples of the parameters' type, as in " + "x.to(torch::k" + wanted + ")" +
                (were_bytes || type == torch::kByte ? ".div(255)" : "") +
                ", or make the network of the samples' type by module->to(). What LibTorch said: " + said,
            {.options = {"train", "module"}}));
}

class PlainStep : public TrainStep {
 public:
  explicit PlainStep(const StepParts& parts)
      : with_(parts), counts_correct_(with_.task.accuracy && with_.net.mesh().tensor().index() == 0) {}

  void run(const Batch& batch) override { take_plainly(batch); }

 protected:
  void take_plainly(const Batch& batch) {
    gradients(batch);
    judge_and_finish(batch);
  }

  void judge_and_finish(const Batch& batch) {
    with_.replicas.before_update();
    with_.watch.watch();
    if (with_.watch.complaint().empty()) finish(batch);
  }

  // The parts' backwards add up; while the last part computes, the sum is averaged over the ranks. Where each rank
  // keeps a slice, each part is averaged, so that nobody keeps all gradients.
  void gradients(const Batch& batch) {
    with_.update.zero_grad();
    add_gradients(batch, /*averages=*/true);
  }

  // Without `averages` the sum stays the rank's own.
  void add_gradients(const Batch& batch, bool averages) {
    if (batch.grain > 0) with_.totals.grain_losses.begin_step(batch.grains());
    const auto& replica = with_.update.part();
    const bool in_slices = batch.grain == 0 && replica->divides_gradients();
    // In slices all ranks need as many parts as the rank with the fewest samples can have.
    const int64_t most = in_slices ? fewest_samples(batch, replica->rank().world_size()) : batch.size();
    const int64_t wanted = with_.options.batch.accumulate;
    // With grains in_parts() gives all ranks the same number of parts.
    const int64_t parts = batch.grain > 0 ? wanted : std::min(wanted, most);
    const auto& of = with_.task.criterion.of();
    const Batch counted = of ? replica->counts().counted(batch, of) : batch;
    const std::vector<Batch> all = parts <= 1 ? std::vector{counted} : counted.in_parts(parts);
    for (size_t part = 0; part < all.size(); ++part) {
      std::optional<NoSync> averaged_later;
      std::optional<PartOfStep> part_of_step;
      const bool is_last = part + 1 == all.size();
      if (!is_last && in_slices) part_of_step.emplace(replica);
      if (!averages || (!is_last && !in_slices)) averaged_later.emplace(replica);
      forward_backward(all[part]);
    }
  }

  int64_t fewest_samples(const Batch& batch, int ranks) const {
    const auto sizes = sizes_of_parts(batch.global_size, shares_of(with_.options.batch), ranks);
    return *std::min_element(sizes.begin(), sizes.end());
  }

  void forward_backward(const Batch& batch) {
    const auto criterion = [&](const torch::Tensor& y_hat, const Batch& part) {
      const torch::Tensor loss = checked_loss(with_.task, with_.rank, y_hat, part);
      // Recomputation may compute a microbatch's loss twice, and only one of the two is for a backward.
      if (c10::GradMode::is_enabled()) count(batch, y_hat, part.y, loss);
      const bool spoils =
          with_.options.on_nan != OnNan::go_on && (judges_gradients_alone_ || !with_.watch.judges_losses());
      return spoils ? spoiling_unless_finite(loss) : loss;
    };
    const torch::Tensor mean = mean_of_backward(batch, criterion);
    with_.watch.add_loss(mean);
    with_.totals.add_loss(mean, batch.size());
  }

  // A backward may compute forward too.
  torch::Tensor mean_of_backward(const Batch& batch, Criterion criterion) {
    if (!with_.task.criterion.is_checked()) criterion = Criterion::unchecked(criterion);
    try {
      Loss loss = [&] {
        const Autocast precision(with_.rank.device(), torch::kBFloat16, computes_in_bf16(with_.options));
        return with_.net.loss(batch, criterion);
      }();
      loss.backward();
      return loss.value();
    } catch (const c10::Error&) {
      explain_types(with_, batch);
      throw;
    }
  }

  // Calls to the other ranks come before the update, so that a rank that is left alone has whole steps only. Ranks
  // agree on the step in share().
  void finish(const Batch& batch) {
    if (with_.totals.shared) {
      with_.update.prepare();
      with_.totals.share(with_.rank);
    }
    with_.update.step();
    with_.replicas.after_update();
    with_.totals.samples += batch.size();
  }

  StepParts with_;
  bool judges_gradients_alone_ = false;  // losses that are not finite spoil the gradients in any case

 private:
  // A run with a grain calls the criterion for one grain, which the scope of its samples tells.
  void count(const Batch& batch, const torch::Tensor& y_hat, const torch::Tensor& y, const torch::Tensor& loss) {
    if (batch.grain > 0 && SampleScope::current()->place().again) return;
    if (counts_correct_) with_.totals.add_right(right_answers(y_hat, y));
    if (batch.grain == 0) return;
    const int64_t grain = SampleScope::current()->place().first / batch.grain;
    with_.totals.grain_losses.add(grain, loss, y.size(0));
  }

  // Several ranks may have the same samples, which must count once. The first rank that sees the network's output adds
  // the correct answers.
  const bool counts_correct_;
};

class SkippingStep : public PlainStep {
 public:
  using PlainStep::PlainStep;

  void run(const Batch& batch) override {
    const torch::NoGradGuard no_grad;
    std::vector<std::pair<torch::Tensor, torch::Tensor>> before;
    const auto keep = [&](const torch::Tensor& tensor) { before.emplace_back(tensor, tensor.clone()); };
    keep(with_.totals.loss);
    const torch::Tensor right = with_.totals.right.clone();
    for (const auto& buffer : with_.update.part()->module().buffers()) keep(buffer);
    {
      const torch::AutoGradMode grad(true);
      gradients(batch);
    }
    with_.replicas.before_update();
    const std::string wrong = with_.watch.judge();
    if (wrong.empty()) return finish(batch);
    for (auto& [tensor, value] : before) tensor.copy_(value);
    with_.totals.right.zero_().narrow(0, 0, right.size(0)).copy_(right);  // it may have grown
    if (batch.grain > 0) with_.totals.grain_losses.drop_step();
    note_skipped(wrong, batch.global_size);
  }

 protected:
  void note_skipped(const std::string& wrong, int64_t samples) {
    if (with_.totals.left_out == 0 && with_.rank.index() == 0 && with_.callbacks.on_warning) {
      with_.callbacks.on_warning(wrong + "; the step was skipped, as are others like it in this epoch");
    }
    with_.totals.left_out += samples;
  }
};

// GraphSkip lets a CUDA graph leave out a step that is not finite. The graph puts back what the step has changed, but
// for the update, which looks at the mark itself (Update::skip_where). Use it while the step is recorded.
class GraphSkip {
 public:
  // `mark` is FiniteWatch::found(), and `loss` the sum of losses.
  GraphSkip(at::Tensor mark, at::Tensor loss)
      : mark_(std::move(mark)), loss_(std::move(loss)), bad_loss_(at::zeros_like(loss_)) {}

  // Call begin() before the step, with the tensors that change, and end() behind FiniteWatch::mark().
  void begin(std::vector<at::Tensor> tensors) {
    const c10::NoGradGuard no_grad;
    mark_.zero_();
    tensors.push_back(loss_);
    for (const auto& tensor : tensors) before_.emplace_back(tensor, tensor.clone());
  }
  void end() {
    const c10::NoGradGuard no_grad;
    const at::Tensor is_bad = mark_[0] > 0;
    bad_loss_.copy_(at::where(is_bad, loss_, bad_loss_));
    for (auto& [tensor, before] : std::exchange(before_, {})) tensor.copy_(at::where(is_bad, before, tensor));
  }

  // Gives the sum of losses in the last step that was left out.
  const at::Tensor& bad_loss() const { return bad_loss_; }

 private:
  const at::Tensor mark_, loss_, bad_loss_;
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // tensors, and their values before the step
};

// A graph holds a step up to its gradients, and the exchange if this can be recorded, beside backward. Otherwise the
// exchange follows the replay. The update is in the graph where the averages are, if its optimizer's numbers lie on the
// GPU and nobody looks at the replicas in between; else it follows too (docs/decisions/0008).
class RecordedStep : public SkippingStep {
 public:
  RecordedStep(const StepParts& parts, std::unique_ptr<Graph> graph)
      : SkippingStep(parts),
        exchange_recorded_(can_record_exchange(with_.net.mesh().data())),
        graphed_(
            with_.rank, std::move(graph), with_.options.batch.global(), exchange_recorded_,
            [this](const Batch& batch) { recorded_part(batch); }, numbers_, memory_format(with_.options)) {
    check_that_order_can_be_learnt();
    if (skips()) {
      check_that_it_can_skip();
      skip_.emplace(with_.watch.found(), with_.totals.loss);
      with_.watch.skip_in_graph(skip_->bad_loss(), [this](const std::string& wrong) { forget_skipped(wrong); });
    }
    const bool exchanges_within = with_.options.batch.grain || with_.options.sync_batchnorm ||
                                  with_.task.criterion.of() || std::holds_alternative<Sharded>(with_.options.way);
    if (!exchanges_within || has_averages()) return;
    throw Error(
        with_.rank.name() +
            ": `cuda_graph` cannot record lockstep's own exchange, by which ranks that share a GPU meet, and with "
            "a `grain`, `sync_batchnorm`, `zero_stage` or a MeanOver it is within the step; give each rank a GPU of "
            "its own, "
            "or leave `cuda_graph` out",
        {.options = {"devices", "cuda_graph"}});
  }

  void run(const Batch& batch) override {
    const auto before = [this] {
      if (!updates_.has_value()) updates_ = can_update();
      judges_gradients_alone_ = !*updates_;  // the watch looks behind the replay, and has no losses
      if (*updates_) with_.update.before_replay();
    };
    // The graph's update is that of a step that was taken.
    if (skips() && !with_.update.can_be_recorded()) return SkippingStep::run(batch);
    if (!graphed_.replay(batch, with_.net.steps_done(), before))
      return skips() ? SkippingStep::run(batch) : take_plainly(batch);
    samples_ = batch.size();
    if (losses_of_grains_.defined()) with_.totals.grain_losses.add_row(losses_of_grains_);
    if (*updates_) {
      with_.update.after_replay();
      with_.totals.samples += batch.size();
      return with_.watch.look();
    }
    // Adds nothing to the gradients, and averages them.
    if (!has_averages()) with_.update.part()->backwards().run([] {});
    judge_and_finish(batch);
  }

  std::shared_ptr<RowNumbers> numbers() const override { return numbers_; }

 private:
  // The steps before the recording learn the order, by an exchange of its own that no graph can hold.
  void check_that_order_can_be_learnt() {
    const int ranks = with_.net.mesh().data().world_size();
    if (!exchange_recorded_ || parts_of_full_batch(with_.options.batch, shares_of(with_.options.batch), ranks)[0] > 0)
      return;
    throw Error(with_.rank.name() + ": `cuda_graph` records the exchange of gradients with the step, in the order in " +
                "which the first device's come, and with `balance` " + to_string(with_.options.batch.balance) +
                " that one gets no samples of a batch; give it a share, put it last, or leave `cuda_graph` out");
  }

  bool skips() const { return with_.options.on_nan == OnNan::skip; }

  void check_that_it_can_skip() const {
    if (has_averages() && with_.options.check_replicas <= 0 && with_.update.can_skip()) return;
    throw Error(
        with_.rank.name() +
            ": `cuda_graph` with `on_nan` skip needs an update that the graph holds: with sgd, adam "
            "or adamw, without `check_replicas` or Task::ema_decay, and with a GPU for each rank; leave one of the two "
            "out",
        {.options = {"cuda_graph", "on_nan"}});
  }

  // The host has counted the step.
  void forget_skipped(const std::string& wrong) {
    with_.update.forget_step();
    with_.totals.samples -= samples_;
    note_skipped(wrong, with_.options.batch.global());
  }

  // Tells whether the graph holds the averages of the gradients.
  bool has_averages() const { return exchange_recorded_ || with_.rank.world_size() == 1; }

  bool can_update() const {
    return has_averages() && with_.options.check_replicas <= 0 && with_.update.can_be_recorded();
  }

  void recorded_part(const Batch& batch) {
    if (skip_) {
      std::vector<torch::Tensor> changed = with_.update.part()->module().buffers();
      changed.push_back(with_.totals.right);
      skip_->begin(std::move(changed));
    }
    with_.update.zero_grad(/*anew=*/with_.rank.world_size() == 1);
    add_gradients(batch, /*averages=*/has_averages());
    if (batch.grain > 0) losses_of_grains_ = with_.totals.grain_losses.take_row();
    if (!*updates_) return;
    with_.watch.mark();
    if (skip_) skip_->end();
    if (skip_ && losses_of_grains_.defined()) losses_of_grains_.masked_fill_(with_.watch.found() > 0, 0);
    with_.update.step();
  }

  const bool exchange_recorded_;
  std::optional<GraphSkip> skip_;   // present with `on_nan` skip
  std::optional<bool> updates_;     // tells whether the graph holds the update; none before the recording
  int64_t samples_ = 0;             // the samples of a full batch here
  torch::Tensor losses_of_grains_;  // the row of GrainLosses; undefined: the batch is no grains
  const std::shared_ptr<RowNumbers> numbers_ = std::make_shared<RowNumbers>(with_.options.batch.global());
  GraphedStep graphed_;
};

}  // namespace

std::unique_ptr<TrainStep> make_step(const StepParts& parts, std::unique_ptr<Graph> graph) {
  if (graph) return std::make_unique<RecordedStep>(parts, std::move(graph));
  if (parts.options.on_nan == OnNan::skip) return std::make_unique<SkippingStep>(parts);
  return std::make_unique<PlainStep>(parts);
}

}  // namespace lockstep
