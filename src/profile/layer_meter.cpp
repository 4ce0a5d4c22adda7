#include "layer_meter.hpp"

#include <ATen/Parallel.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/nn/sample_scope.hpp>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/classic.hpp"
#include "base/seconds_since.hpp"
#include "devices/memory_meter.hpp"

namespace lockstep {
namespace {

using at::Tensor;

constexpr int64_t samples_for_bytes = 32;  // so many samples hide the bytes that do not grow with them
constexpr double seconds_per_size = 0.25;
constexpr int fewest_rounds = 3, most_rounds = 25;

// Ends one layer's graph, and begins the next one's.
Tensor boundary(const Tensor& output) {
  return output.detach().requires_grad_(output.requires_grad());
}

void keep_better(double& best, double seconds) {
  if (best == 0 || seconds < best) best = seconds;
}

// Draws the line through the bytes of two numbers of samples.
std::vector<LayerMessage> messages_of(const std::vector<LayerMessage>& few, const std::vector<LayerMessage>& many,
                                      int64_t few_samples, int64_t many_samples) {
  std::vector<LayerMessage> messages;
  for (size_t i = 0; i < std::min(few.size(), many.size()); ++i) {
    LayerMessage message{.kind = many[i].kind};
    message.bytes_per_sample = many_samples == few_samples
                                   ? many[i].bytes / static_cast<double>(many_samples)
                                   : (many[i].bytes - few[i].bytes) / static_cast<double>(many_samples - few_samples);
    message.bytes = few[i].bytes - message.bytes_per_sample * static_cast<double>(few_samples);
    messages.push_back(message);
  }
  return messages;
}

}  // namespace

LayerMeter::LayerMeter(torch::nn::Sequential net, std::vector<std::string> names, Batch sample, Criterion criterion,
                       c10::intrusive_ptr<EchoBackend> echo)
    : net_(std::move(net)),
      names_(std::move(names)),
      sample_(std::move(sample)),
      criterion_(std::move(criterion)),
      echo_(std::move(echo)),
      on_one_thread_(sample_.x.device().is_cpu() && at::get_num_threads() == 1) {
  net_->train();
}

// Calls layer `layer`, or the criterion behind the last one.
Tensor LayerMeter::call(size_t layer, const Tensor& x, int64_t samples) {
  const SampleScope scope({.size = samples});
  try {
    if (layer == names_.size()) return criterion_(x, sample_.y.narrow(0, 0, samples));
    return (net_->begin() + static_cast<std::ptrdiff_t>(layer))->forward<Tensor>(x);
  } catch (const c10::Error& error) {
    throw Error("profile: " + (layer == names_.size() ? "the criterion" : "layer " + names_[layer]) +
                    " fails on an input " + classic_text(x.sizes()) + ": " + error.what_without_backtrace(),
                {Error::user_code});
  }
}

// Reads this rank's clock. If its thread alone computes, this is the thread's computing time.
double LayerMeter::now() const {
  if (on_one_thread_) return thread_seconds();
  synchronize(sample_.x.device());
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Measures the seconds of action(), without the time in which the EchoBackend answered.
template <class Action>
double LayerMeter::seconds_of(const Action& action) {
  const double echo = echo_ ? echo_->seconds() : 0;
  const double start = now();
  action();
  const double seconds = now() - start;
  return std::max(0.0, seconds - (echo_ ? echo_->seconds() - echo : 0));
}

LayerMeter::StepTimes LayerMeter::step(int64_t samples) {
  StepTimes times;
  Tensor x = sample_.x.narrow(0, 0, samples);
  times.forward = seconds_of([&] {
    for (size_t i = 0; i <= names_.size(); ++i) x = call(i, x, samples);
  });
  times.backward = seconds_of([&] { x.backward(); });
  return times;
}

// Runs a step in which each layer has a graph of its own. Puts better times into `times`. Fills in exchanges and
// workspaces if they are not null.
void LayerMeter::step_by_layers(int64_t samples, std::vector<StepTimes>& times, Exchanges* exchanges,
                                std::vector<double>* workspaces) {
  const size_t count = names_.size() + 1;
  std::optional<MemoryMeter> meter;
  if (workspaces != nullptr) meter.emplace();
  std::vector<Tensor> inputs(count), outputs(count);
  const auto exchanged = [&](std::vector<Messages> Exchanges::*part, size_t layer) {
    if (!echo_) return;
    auto messages = echo_->take_messages();
    if (exchanges != nullptr) (exchanges->*part)[layer] = std::move(messages);
  };
  for (size_t i = 0; i < count; ++i) {
    inputs[i] = i == 0 ? sample_.x.narrow(0, 0, samples) : boundary(outputs[i - 1]);
    keep_better(times[i].forward, seconds_of([&] { outputs[i] = call(i, inputs[i], samples); }));
    exchanged(&Exchanges::forward, i);
  }
  for (size_t i = count; i-- > 0;) {
    const Tensor gradient = i + 1 == count ? Tensor() : inputs[i + 1].grad();
    if (i + 1 < count) inputs[i + 1] = Tensor();
    if (!outputs[i].requires_grad() || (i + 1 < count && !gradient.defined())) continue;
    const auto backward = [&] { keep_better(times[i].backward, seconds_of([&] { outputs[i].backward(gradient); })); };
    if (workspaces != nullptr) {
      meter->reset_peak();
      const int64_t before = meter->current();
      backward();
      // The gradient of the output takes memory too.
      const double bytes = static_cast<double>(meter->peak() - before) +
                           (gradient.defined() ? static_cast<double>(gradient.nbytes()) : 0);
      (*workspaces)[i] = std::max((*workspaces)[i], bytes);
    } else {
      backward();
    }
    exchanged(&Exchanges::backward, i);
    outputs[i] = Tensor();
  }
}

// Measures a number of samples in about `seconds`. Returns the seconds of two steps.
double LayerMeter::add_point(int64_t samples, double seconds, std::vector<LayerProfile>& profiles) {
  std::vector<StepTimes> layers(names_.size() + 1);  // the best times so far, of each layer and the criterion
  StepTimes whole;
  const auto round = [&] {
    const auto start = std::chrono::steady_clock::now();
    step_by_layers(samples, layers);
    const StepTimes here = step(samples);
    keep_better(whole.forward, here.forward);
    keep_better(whole.backward, here.backward);
    return seconds_since(start);
  };
  round();  // the first round allocates memory and fills caches
  layers.assign(layers.size(), {});
  whole = {};
  const double one = round();
  const int rounds = std::clamp(static_cast<int>(seconds / one), fewest_rounds, most_rounds);
  for (int i = 1; i < rounds; ++i) round();

  StepTimes sum;
  for (const auto& layer : layers) {
    sum.forward += layer.forward;
    sum.backward += layer.backward;
  }
  const double forward = whole.forward / sum.forward, backward = whole.backward / sum.backward;
  for (size_t i = 0; i < layers.size(); ++i) {
    profiles[i].forward.points.push_back({samples, layers[i].forward * forward});
    profiles[i].backward.points.push_back({samples, layers[i].backward * backward});
  }
  return one;
}

// Measures the bytes that each layer needs only while its forward or backward runs. The gradients must exist already.
std::vector<double> LayerMeter::workspaces(int64_t samples) {
  std::vector<double> bytes(names_.size() + 1);
  std::vector<StepTimes> ignored(names_.size() + 1);
  step_by_layers(samples, ignored, nullptr, &bytes);
  MemoryMeter meter;
  Tensor x = sample_.x.narrow(0, 0, samples);
  for (size_t i = 0; i <= names_.size(); ++i) {
    const int64_t before = meter.current();
    meter.reset_peak();
    x = call(i, x, samples);
    bytes[i] = std::max(bytes[i], static_cast<double>(meter.peak() - std::max(before, meter.current())));
  }
  return bytes;
}

void LayerMeter::count_bytes(std::vector<LayerProfile>& profiles) {
  const int64_t samples = std::max(smallest_, std::min(sample_.size(), samples_for_bytes));
  const int64_t few = std::max(smallest_, samples / 2);
  std::vector<StepTimes> ignored(names_.size() + 1);
  step_by_layers(samples, ignored);  // the gradients exist then
  const auto some = workspaces(few), more = workspaces(samples);

  MemoryMeter meter;
  Tensor x = sample_.x.narrow(0, 0, samples);
  int64_t before = 0;
  for (size_t i = 0; i <= names_.size(); ++i) {
    x = call(i, x, samples);
    const int64_t now = meter.current();
    auto& profile = profiles[i];
    profile.output_bytes = static_cast<double>(x.nbytes()) / static_cast<double>(samples);
    profile.saved_bytes = static_cast<double>(now - before) / static_cast<double>(samples);
    before = now;
    profile.workspace_bytes = samples == few ? more[i] / static_cast<double>(samples)
                                             : std::max(0.0, more[i] - some[i]) / static_cast<double>(samples - few);
    profile.fixed_workspace_bytes = std::max(0.0, more[i] - profile.workspace_bytes * static_cast<double>(samples));
  }
  for (size_t i = 0; i < names_.size(); ++i) {
    const auto module = (net_->begin() + static_cast<std::ptrdiff_t>(i))->ptr();
    for (const auto& parameter : module->parameters()) {
      profiles[i].parameter_bytes += static_cast<double>(parameter.nbytes());
    }
    for (const auto& buffer : module->buffers()) profiles[i].buffer_bytes += static_cast<double>(buffer.nbytes());
  }
}

void LayerMeter::count_messages(std::vector<LayerProfile>& profiles) {
  const int64_t few_samples = smallest_, many_samples = std::max(smallest_, std::min(2 * smallest_, sample_.size()));
  const size_t count = names_.size() + 1;
  std::vector<StepTimes> ignored(count);
  Exchanges few{std::vector<Messages>(count), std::vector<Messages>(count)}, many = few;
  echo_->take_messages();
  step_by_layers(few_samples, ignored, &few);
  step_by_layers(many_samples, ignored, &many);
  for (size_t i = 0; i < count; ++i) {
    profiles[i].forward_messages = messages_of(few.forward[i], many.forward[i], few_samples, many_samples);
    profiles[i].backward_messages = messages_of(few.backward[i], many.backward[i], few_samples, many_samples);
  }
}

std::vector<LayerProfile> LayerMeter::measure(double seconds) {
  const auto start = std::chrono::steady_clock::now();
  const auto left = [&] { return seconds - seconds_since(start); };
  try {
    step(smallest_);
  } catch (const Error&) {
    // Normalisation over the batch may need two samples. Any other error shows again.
    smallest_ = std::min<int64_t>(2, sample_.size());
    step(smallest_);
  }
  std::vector<LayerProfile> profiles(names_.size() + 1);
  for (size_t i = 0; i < names_.size(); ++i) profiles[i].name = names_[i];
  profiles.back().name = "loss";
  count_bytes(profiles);
  if (echo_) count_messages(profiles);

  int64_t measured = 0;
  double took = 0;  // seconds of the last size's round
  for (int64_t samples = smallest_; measured < sample_.size(); samples = std::min(2 * samples, sample_.size())) {
    // A line needs two sizes. A third size needs time for itself: one round to warm up, and the fewest that count.
    const double expected = took * 2 * (1 + fewest_rounds);
    if (profiles[0].forward.points.size() >= 2 && expected > left()) break;
    took = add_point(samples, std::min(seconds_per_size, std::max(0.0, left())), profiles);
    measured = samples;
  }
  return profiles;
}

}  // namespace lockstep
