#include <ATen/autocast_mode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/lab/recorded.hpp>

#include "data_parallel/flat_view.hpp"
#include "data_parallel/optimizer_parts.hpp"
#include "devices/cuda_graph.hpp"
#include "graphed_step.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/rank_wait.hpp"

#include <algorithm>
#include <optional>
#include <string>
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
        fused_(optimizer_.fused()),
        loss_of_(std::move(loss_of)),
        options_(options),
        records_(rank().device().is_cuda()),
        exchange_recorded_(records_ && can_record_exchange(rank())),
        has_averages_(exchange_recorded_ || rank().world_size() == 1),
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
    if (replica_->grains().check())
      refuse("grain_check",
             "a grain_check compares on the host, which a replay does not call; leave one of the two out");
    if (records_ && comm::RankPlace::of(rank()).run->succession != nullptr) {
      refuse("succession",
             "in an elastic run the host looks at the exchange before each update, and a replay does not; leave one of "
             "the two out");
    }
    if (replica_->sharded()) check_exchange("a sharded net");
    if (has_sync_batchnorm(replica_->module())) check_exchange("a SyncBatchNorm");
    if (fused_ != nullptr && !fused_->claim())
      refuse("optimizer", "another Recorded steps this optimizer; make one for each optimizer");
  }
  ~Step() {
    if (fused_ != nullptr) fused_->release();
  }
  Step& operator=(Step&&) = delete;

  at::Tensor run(const Batch& batch) {
    if (batch.grain > 0) check_exchange("BatchOptions::grain");
    if (!replica_->backwards().syncs())
      refuse("no_sync", "each call is a whole step, and a NoSync lives; end it first");
    optimizer_.begin_step(options_);
    const int64_t number = replica_->places().steps_done();
    if (!records_) return compute(batch);
    begin_anew_after_changes();
    if (!graphed_) make_graph(batch);
    const bool is_recorded = held_.has_value();
    if (!graphed_->replay(batch, number, [this] { before_replay(); })) return compute(batch);
    if (!is_recorded) held_ = held_now();
    if (!has_averages_) replica_->backwards().run([] {});  // adds nothing to the gradients, and averages them
    if (*updates_) {
      fused_->after_replay();
    } else {
      optimizer_.update(options_);
    }
    replica_->places().set_steps_done(number + 1);
    return loss_.clone();  // the next replay writes to loss_
  }

 private:
  // Held is what a graph holds as it was in the recording. Tensors are kept, so that no others come into their places.
  struct Held {
    std::vector<bool> modes;         // layers that train, parameters that are not frozen, and mixed precision
    std::vector<at::Tensor> memory;  // values of the parameters and buffers
    Fused::Held optimizer = {};
  };

  Rank& rank() const { return replica_->rank(); }

  [[noreturn]] void refuse(const std::string& option, const std::string& why) const {
    throw Error(rank().name() + ": Recorded: " + why, {.options = {option}});
  }

  void check_exchange(const std::string& what) const {
    if (has_averages_ || !records_) return;
    refuse("devices",
           what +
               " exchanges within the step, and ranks that share a GPU exchange by host code, which no graph holds; "
               "give each rank a GPU of its own, or step without Recorded");
  }

  void make_graph(const Batch& batch) {
    if (full_size_ == 0) full_size_ = batch.global_size;
    if (exchange_recorded_ && rank().index() == 0 && batch.size() == 0) {
      refuse("shares",
             "the exchange is recorded in the order in which this rank's gradients come, and the rank has no samples; "
             "give it a share of each batch (BatchOptions::shares)");
    }
    graphed_.emplace(rank(), make_cuda_graph(), full_size_, exchange_recorded_,
                     [this](const Batch& input) { record(input); });
  }

  std::vector<bool> modes_now() const {
    std::vector<bool> modes = {replica_->module().is_training(), at::autocast::is_autocast_enabled(at::kCUDA)};
    for (const auto& layer : layers_) modes.push_back(layer->is_training());
    for (const auto& parameter : parameters_) modes.push_back(parameter.requires_grad());
    return modes;
  }

  std::vector<at::Tensor> tensors_now() const {
    std::vector<at::Tensor> tensors = replica_->module().buffers();
    tensors.insert(tensors.end(), parameters_.begin(), parameters_.end());
    return tensors;
  }

  Held held_now() const {
    Held held{.modes = modes_now(), .memory = tensors_now()};
    for (auto& tensor : held.memory) tensor = tensor.detach();
    if (*updates_) held.optimizer = fused_->held();
    return held;
  }

  bool holds_what_is() const {
    const auto same_memory = [](const at::Tensor& a, const at::Tensor& b) { return a.is_alias_of(b); };
    const auto tensors = tensors_now();
    return held_->modes == modes_now() && (!*updates_ || fused_->has(held_->optimizer)) &&
           std::equal(tensors.begin(), tensors.end(), held_->memory.begin(), held_->memory.end(), same_memory);
  }

  void begin_anew_after_changes() {
    if (!held_ || holds_what_is()) return;
    synchronize(rank());  // the last replay is done, and its memory can go
    graphed_.reset();
    held_.reset();
    updates_.reset();
    gradients_.clear();
    optimizer_.zero_grad(/*in_place=*/false);  // frozen parameters have none
    if (fused_ != nullptr) fused_->forget_recorded_step();
  }

  // The gradients' memory stays in its place, where a graph writes.
  at::Tensor compute(const Batch& batch) {
    put_gradients_back();
    optimizer_.zero_grad(/*in_place=*/records_);
    Loss loss = loss_of_(batch);
    loss.backward();
    if (gradients_.empty()) keep_gradients();
    optimizer_.update(options_);
    return loss.value();
  }

  void before_replay() {
    put_gradients_back();
    if (!updates_) updates_ = has_averages_ && fused_ != nullptr && fused_->can_be_recorded();
    if (*updates_) fused_->before_replay();
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

  // A user may have cleared the gradients, or computed others.
  void put_gradients_back() {
    for (size_t i = 0; i < gradients_.size(); ++i) {
      at::Tensor& gradient = parameters_[i].mutable_grad();
      const bool is_there = gradient.defined() && gradients_[i].defined() && same_memory(gradient, gradients_[i]);
      if (!is_there) gradient = gradients_[i];
    }
  }

  // Keeps other tensors of the same memory: the reducer takes a gradient of two owners for one that the user keeps.
  void keep_gradients() {
    if (!records_ || replica_->sharded()) return;
    gradients_.clear();
    for (const auto& parameter : parameters_) {
      const at::Tensor& gradient = parameter.grad();
      gradients_.push_back(gradient.defined() ? gradient.detach() : gradient);
    }
  }

  const std::shared_ptr<Replica> replica_;
  Optimizer::Parts optimizer_;
  Fused* const fused_;  // null: the optimizer's numbers lie on the host
  const std::function<Loss(const Batch&)> loss_of_;
  const StepOptions options_;
  const bool records_;
  const bool exchange_recorded_;
  const bool has_averages_;  // the graph holds the averages of the gradients
  std::vector<at::Tensor> parameters_;
  const std::vector<std::shared_ptr<torch::nn::Module>> layers_;
  std::vector<at::Tensor> gradients_;  // gradients in the memory that the graph writes to
  int64_t full_size_ = 0;              // the size of batches that are recorded; 0: no batch came yet
  std::optional<GraphedStep> graphed_;
  std::optional<bool> updates_;  // tells whether the graph holds the update; none before the recording
  std::optional<Held> held_;     // none before the recording
  at::Tensor loss_;              // the loss that the graph writes
};

Recorded::Recorded(const std::shared_ptr<Replica>& replica, Optimizer& optimizer,
                   std::function<Loss(const Batch&)> loss_of, const StepOptions& options)
    : step_(std::make_unique<Step>(replica, optimizer, std::move(loss_of), options)) {}

Recorded::~Recorded() = default;

at::Tensor Recorded::operator()(const Batch& batch) {
  return step_->run(batch);
}

}  // namespace lockstep
