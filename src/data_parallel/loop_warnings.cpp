#include "loop_warnings.hpp"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/nn/dropout.hpp>

#include "base/classic.hpp"
#include "counted_targets.hpp"
#include "data/latest_batch.hpp"
#include "devices/cuda_graph.hpp"
#include "flat_view.hpp"
#include "gradient_hook.hpp"
#include "nn/factors_scope.hpp"
#include "nn/random_layers.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "running_statistics_names.hpp"

#include <mutex>
#include <set>
#include <vector>

namespace lockstep {
namespace {

// Gives the name of a layer in eval() mode that acts otherwise in training; empty if there is none.
std::string layer_that_evaluates(const torch::nn::Module& net) {
  for (const auto& item : net.named_modules()) {
    const torch::nn::Module& layer = *item.value();
    if (layer.is_training()) continue;
    const auto* const dropout = dynamic_cast<const DropoutImpl*>(&layer);
    if (dropout != nullptr && dropout->options.p > 0) return item.key();
    for (const auto& buffer : layer.named_buffers(/*recurse=*/false)) {
      if (is_running_statistic(buffer.key())) return item.key();
    }
  }
  return first_random_layer(net);
}

constexpr int kChanges = 3;        // so many changes of a parameter between forwards bring a warning
constexpr int kForwardsOnGpu = 6;  // the host waits for what is compared
constexpr int kNotedOnGpu = 3;     // a GPU's parameter is noted and compared at most so often

// Gives an undefined tensor if nothing is trained.
at::Tensor smallest_trained(const torch::nn::Module& net) {
  at::Tensor smallest;
  for (const auto& parameter : net.parameters()) {
    if (!parameter.requires_grad() || parameter.numel() == 0) continue;
    if (!smallest.defined() || parameter.numel() < smallest.numel()) smallest = parameter.detach();
  }
  return smallest;
}

constexpr int kGrainsSeen = 4;  // a generator's state has 5 kB

at::Tensor state_of_default_generator() {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

struct OwnBuffer {
  std::string name;
  at::Tensor buffer;
  uint32_t version = 0;
};

// Gives the buffers that are no running statistics. By grains, running statistics are other tensors during a forward.
std::vector<OwnBuffer> own_buffers(const torch::nn::Module& net) {
  std::vector<OwnBuffer> buffers;
  for (const auto& item : net.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined() || buffer.is_inference() || is_running_statistic(item.key())) continue;
    buffers.push_back({item.key(), buffer, static_cast<uint32_t>(buffer._version())});
  }
  return buffers;
}

}  // namespace

void LoopWarnings::warn_once(bool& told, const std::string& text) const {
  if (!std::exchange(told, true)) comm::RankPlace::of(rank_).warn("DataParallel: " + text);
}

// One change may be weights that all ranks have loaded.
void LoopWarnings::see_forward() {
  const bool waits = !rank_.device().is_cpu() && forwards_ >= kForwardsOnGpu;
  if (averages_ || waits || rank_.index() != 0 || rank_.world_size() == 1 || !c10::GradMode::is_enabled()) return;
  if (rank_.device().is_cuda() && is_recording()) return;
  const c10::AutoGradMode no_grad(false);
  ++forwards_;
  if (!parameter_.defined()) parameter_ = smallest_trained(net_);
  if (!parameter_.defined()) return;
  if (value_.defined() && same_values(value_, parameter_)) return;
  changes_ += value_.defined() ? 1 : 0;
  value_ = parameter_.clone();
  if (changes_ < kChanges) return;
  warn_once(averages_,
            "the parameters change, and no backward was ever averaged, so that each rank may train a network of its "
            "own. Gradients of torch::autograd::grad(), or set by hand, are this rank's alone: call net.loss(batch, "
            "criterion).backward(). If your own code makes them equal on all ranks, set DataParallelOptions::average = "
            "false");
}

void LoopWarnings::see_backward(int32_t mark) {
  averages_ = true;
  parameter_.reset();
  value_.reset();
  if (rank_.index() != 0) return;
  see_mode();
  see_order(mark);
}

void LoopWarnings::see_mode() {
  if (mode_seen_ || net_.is_training()) return;
  const std::string layer = layer_that_evaluates(net_);
  if (layer.empty()) return void(mode_seen_ = true);
  warn_once(mode_seen_, "a backward while the net is in eval() mode, so that " + layer +
                            " acts as in an evaluation. Call net.train() after each evaluation; if it is meant, put "
                            "only the layers that it is meant for into eval() mode");
}

void LoopWarnings::see_order(int32_t mark) {
  if (order_told_ || !is_of_shuffled(mark)) return;
  if (first_mark_ == 0) first_mark_ = mark;
  const bool again = mark == first_mark_ && last_mark_ != 0 && last_mark_ != mark;
  last_mark_ = mark;
  if (!again) return;
  warn_once(order_told_,
            "the shuffled batches come in the same order as before. Set BatchOptions::epoch to the number of the "
            "epoch, which makes another order of each");
}

// A part that is the whole batch has the mean that one device has. A CUDA graph cannot record what the host reads.
void LoopWarnings::see_loss(const at::Tensor& mean, int64_t samples, int64_t of_batch) {
  see_leaves(mean, samples);
  if (samples == of_batch || (rank_.device().is_cuda() && is_recording())) return;
  if (!rank_.device().is_cpu() && ++targets_checked_ > kChecksOnGpu) return;
  check_counted_targets(mean, samples, rank_.name() + ": DataParallel");
}

void LoopWarnings::see_leaves(const at::Tensor& loss, int64_t samples) {
  if (leaves_seen_ || rank_.index() != 0 || rank_.world_size() == 1 || !loss.grad_fn()) return;
  leaves_seen_ = true;
  // A parameter that was unfrozen has its hook from the backward on.
  std::set<const c10::TensorImpl*> parameters;
  for (const auto& parameter : net_.parameters()) parameters.insert(parameter.unsafeGetTensorImpl());
  for (const auto& [leaf, uses] : uses_in_graph(loss)) {
    const auto sizes = leaf->sizes();
    const bool is_input = !sizes.empty() && sizes[0] == samples;
    if (is_input || GradientHook::is_behind(*leaf) || parameters.contains(leaf)) continue;
    return comm::RankPlace::of(rank_).warn(
        "DataParallel: the loss leads to a tensor of shape " + classic_text(sizes) +
        " that needs a gradient and is no parameter of a DataParallel. Nobody averages its gradient, so each rank "
        "would train another one. Register it in the net with register_parameter(), before the DataParallel is made; "
        "if it is not trained, requires_grad_(false) saves its gradient");
  }
}

// Draws of another rank of this process are seen too, and repeat as little.
void LoopWarnings::see_grain(const std::function<void()>& forward) {
  if (rank_.index() != 0 || grains_ >= kGrainsSeen) return forward();
  const at::Tensor state = rank_.device().is_cpu() ? state_of_default_generator() : at::Tensor();
  const auto buffers = own_buffers(net_);
  forward();
  if (state.defined() && !state.equal(state_of_default_generator())) {
    warn_once(draws_told_,
              "something drew from LibTorch's default generator while a grain was computed, so the bits are not the "
              "same in each run. Where the net's forward calls torch::dropout(), take lockstep::Dropout (dropout.hpp)");
  }
  const bool may_fill_caches = grains_++ == 0;
  for (const auto& [name, buffer, version] : buffers) {
    if (may_fill_caches || buffer._version() == version) continue;
    return warn_once(
        buffer_told_,
        "the buffer " + name +
            " changed while a grain was computed. Each rank changes its own by its own grains, so that it depends on "
            "the number of ranks, and so does what is computed from it. With a grain BatchNorm's and InstanceNorm's "
            "running statistics are kept the same, and no other buffers; change this one between the steps, from what "
            "is equal on all ranks");
  }
}

// ---- Gradients that nobody averages.

// One parameter is enough to tell, and the last layer's bias, which comes first, is small. The value is compared, and
// not the version counter, because LibTorch's optimizers bypass that.
void UnaveragedGradients::note(const std::string& parameter_name, const at::Tensor& parameter) {
  if (rank_.world_size() == 1 || (rank_.device().is_cuda() && is_recording())) return;
  const bool on_gpu = !rank_.device().is_cpu();
  const c10::AutoGradMode no_grad(false);
  if (value_.defined()) {  // so a whole loop of such backwards ends at its second one
    if (noted_parameter_ == parameter.unsafeGetTensorImpl() && !(on_gpu && ++compared_ > kNotedOnGpu)) check();
    return;
  }
  if (on_gpu && ++noted_ > kNotedOnGpu) return;  // the host waits for what is compared
  noted_parameter_ = parameter.unsafeGetTensorImpl();
  parameter_name_ = parameter_name;
  parameter_ = parameter.detach();
  value_ = parameter_.clone();
}

void UnaveragedGradients::forget() {
  parameter_.reset();
  value_.reset();
}

void UnaveragedGradients::check() const {
  if (!value_.defined() || same_values(value_, parameter_)) return;
  throw Error(name_ + ": " + parameter_name_ +
              " was changed after a backward whose gradients were never averaged, so the ranks' networks differ now. "
              "Call net.loss(batch, criterion).backward(), or net.mean(…).backward(), in place of the backward() of a "
              "tensor; end a no_sync() guard before the last backward of a step; nets that one loss trains belong into "
              "one module, and so into one DataParallel");
}

}  // namespace lockstep
