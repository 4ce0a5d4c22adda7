#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/lab/recorded.hpp>

#include "data_parallel/optimizer_halves.hpp"
#include "devices/cuda_graph.hpp"
#include "graphed_step.hpp"
#include "ranks/rank_wait.hpp"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// More in one graph is less for the host to queue: the exchange if NCCL does it, and the update if the averages are
// there and the optimizer's numbers lie on the GPU. What the graph lacks follows each replay.
class Recorded::Step {
 public:
  Step(std::shared_ptr<Replica> replica, Optimizer& optimizer, std::function<Loss(const Batch&)> loss_of,
       const StepOptions& options)
      : replica_(std::move(replica)),
        optimizer_(optimizer),
        loss_of_(std::move(loss_of)),
        options_(options),
        on_gpu_(!rank().device().is_cpu()),
        exchanges_in_graph_(on_gpu_ && can_record_exchange(rank())),
        has_averages_(exchanges_in_graph_ || rank().world_size() == 1),
        parameters_(replica_->module().parameters()),
        layers_(replica_->module().modules(/*include_self=*/false)) {
    if (optimizer_.replica() != replica_)
      refuse("optimizer", "the optimizer is another net's; give the one that was made of this net");
    if (options.skip_not_finite) {
      refuse("skip_not_finite",
             "`skip_not_finite` has the host look at the gradients before each update; leave it out, or step without "
             "Recorded");
    }
    if (replica_->divides_parameters()) {
      refuse("sharded",
             "with Sharded::parameters layers are gathered by host code within forward and backward; take "
             "Sharded::gradients");
    }
    if (replica_->sharded()) check_exchange("a sharded net");
    if (has_sync_batchnorm(replica_->module())) check_exchange("a SyncBatchNorm");
  }

  at::Tensor run(const Batch& batch) {
    if (batch.grain > 0) check_exchange("BatchOptions::grain");
    optimizer_.check_step(options_);
    begin_anew_after_changes();
    const int64_t number = replica_->places().steps_done();
    if (on_gpu_ && !graphed_) {
      graphed_.emplace(rank(), make_cuda_graph(), batch.global_size, exchanges_in_graph_,
                       [this](const Batch& input) { record(input); });
    }
    if (!graphed_ || !graphed_->replay(batch, number, [this] { before_replay(); })) return compute(batch);
    if (!has_averages_) replica_->backwards().run([] {});  // adds nothing to the gradients, and averages them
    if (*updates_) {
      optimizer_.fused()->after_replay();
    } else {
      optimizer_.update(options_);
    }
    replica_->places().set_steps_done(number + 1);
    return loss_.clone();  // the next replay writes to loss_
  }

 private:
  Rank& rank() const { return replica_->rank(); }

  [[noreturn]] void refuse(const std::string& option, const std::string& why) const {
    throw Error(rank().name() + ": Recorded: " + why, {.options = {option}});
  }

  void check_exchange(const std::string& what) const {
    if (has_averages_ || !on_gpu_) return;
    refuse("devices",
           what +
               " exchanges within the step, and ranks that share a GPU exchange by host code, which no graph holds; "
               "give each rank a GPU of its own, or step without Recorded");
  }

  // A graph holds each layer's mode, what is frozen, and all options but learning rates as they were.
  void begin_anew_after_changes() {
    if (!on_gpu_) return;
    std::vector<bool> now = {replica_->module().is_training()};
    for (const auto& layer : layers_) now.push_back(layer->is_training());
    for (const auto& parameter : parameters_) now.push_back(parameter.requires_grad());
    const bool has_options = optimizer_.fused() == nullptr || optimizer_.fused()->has_recorded_options();
    if (std::exchange(held_, now) == now && has_options) return;
    if (graphed_) synchronize(rank());  // its last replay is done, and its memory can go
    graphed_.reset();
    updates_.reset();
    gradients_.clear();
    optimizer_.zero_grad(/*in_place=*/false);  // what is frozen has none
    if (optimizer_.fused() != nullptr) optimizer_.fused()->forget_recorded_step();
  }

  // A graph needs the gradients' memory in its place.
  at::Tensor compute(const Batch& batch) {
    optimizer_.zero_grad(/*in_place=*/on_gpu_);
    Loss loss = loss_of_(batch);
    loss.backward();
    keep_gradients();
    optimizer_.update(options_);
    return loss.value();
  }

  // A user may have cleared the gradients, or computed others.
  void before_replay() {
    for (size_t i = 0; i < gradients_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      if (!gradient.is_same(gradients_[i])) gradient = gradients_[i];
    }
    if (!updates_) updates_ = has_averages_ && optimizer_.fused() != nullptr && optimizer_.fused()->can_be_recorded();
    if (*updates_) optimizer_.fused()->before_replay();
  }

  // One rank's backward writes gradients that are not there, and adds to nothing.
  void record(const Batch& batch) {
    optimizer_.zero_grad(/*in_place=*/rank().world_size() > 1);
    Loss loss = loss_of_(batch);
    {
      std::optional<NoSync> averaged_later;
      if (!has_averages_) averaged_later.emplace(replica_);
      loss.backward();
    }
    loss_ = loss.value();
    keep_gradients();
    if (*updates_) optimizer_.update(options_);
  }

  void keep_gradients() {
    if (!on_gpu_ || replica_->sharded()) return;
    gradients_.clear();
    for (const auto& parameter : parameters_) gradients_.push_back(parameter.grad());
  }

  const std::shared_ptr<Replica> replica_;
  Optimizer::Halves optimizer_;
  const std::function<Loss(const Batch&)> loss_of_;
  const StepOptions options_;
  const bool on_gpu_;
  const bool exchanges_in_graph_;
  const bool has_averages_;  // the graph holds the averages of the gradients
  std::vector<at::Tensor> parameters_;
  const std::vector<std::shared_ptr<torch::nn::Module>> layers_;
  std::vector<bool> held_;             // what the graph holds: modes of layers, and which parameters are not frozen
  std::vector<at::Tensor> gradients_;  // gradients of the last step, where the graph has them
  std::optional<bool> updates_;        // tells whether the graph holds the update; none before the recording
  at::Tensor loss_;                    // the loss that the graph writes
  std::optional<GraphedStep> graphed_;
};

Recorded::Recorded(const std::shared_ptr<Replica>& replica, Optimizer& optimizer,
                   std::function<Loss(const Batch&)> loss_of, const StepOptions& options)
    : step_(std::make_unique<Step>(replica, optimizer, std::move(loss_of), options)) {}

Recorded::~Recorded() = default;

at::Tensor Recorded::operator()(const Batch& batch) {
  return step_->run(batch);
}

}  // namespace lockstep
