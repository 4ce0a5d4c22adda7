#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <lockstep/checkpoint.hpp>
#include <lockstep/data_parallel.hpp>
#include <lockstep/error.hpp>
#include <lockstep/evaluate.hpp>
#include <lockstep/models.hpp>
#include <lockstep/trainer.hpp>

#include "run_folder.hpp"
#include "trace.hpp"
#include "train_options.hpp"

#include <chrono>
#include <exception>
#include <iomanip>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kProgressInterval{100};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Ends a rank, and with it all others, because the user asked for it.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped by request"; }
};

// A stop that the user asked another process for ends this one's run with nothing but its text.
bool is_stop(const Error& error) {
  if (std::string_view(error.what()).ends_with(Stopped().what())) return true;
  try {
    std::rethrow_if_nested(error);
  } catch (const Stopped&) {
    return true;
  } catch (...) {
  }
  return false;
}

// What all processes of a launcher must have in common: all that shapes their steps. Folders and devices may differ.
std::string common_settings(const TrainOptions& options) {
  std::ostringstream text;
  text << std::setprecision(17) << "model " << options.model << ", data " << options.data << ", batch size "
       << options.batch_size << ", learning rate " << options.lr << ", epochs " << options.epochs << ", seed "
       << options.seed << (options.trace.empty() ? "" : ", traced");
  return text.str();
}

// Sums over the samples that a rank has seen; they stay on its device, so that nothing waits for it.
struct Totals {
  explicit Totals(const c10::Device& device)
      : loss(torch::zeros({}, torch::TensorOptions(device).dtype(torch::kDouble))),
        correct(torch::zeros({}, torch::TensorOptions(device).dtype(torch::kLong))) {}

  void add(const torch::Tensor& mean_loss, const torch::Tensor& logits, const torch::Tensor& y) {
    const torch::NoGradGuard no_grad;
    loss.add_(mean_loss.detach() * static_cast<double>(y.size(0)));
    correct.add_((logits.argmax(1) == y).sum());
    samples += y.size(0);
  }

  torch::Tensor loss;
  torch::Tensor correct;
  int64_t samples = 0;
};

// What one rank does from the first epoch to the last.
class RankTrainer {
 public:
  RankTrainer(const TrainOptions& options, const TrainCallbacks& callbacks, const ImageData& data, Rank& rank,
              Trace* trace)
      : options_(options),
        callbacks_(callbacks),
        rank_(rank),
        trace_(trace),
        train_(data.train.to(rank.device())),
        test_(data.test.to(rank.device())),
        net_(LeNet(options.seed), rank),
        optimizer_(net_->parameters(), options.lr) {}

  EpochMetrics epoch(int number) {
    EpochMetrics metrics;
    metrics.epoch = number;
    const Totals totals = train(number, metrics.seconds);
    rank_.allreduce(totals.loss);
    rank_.allreduce(totals.correct);
    metrics.train_loss = totals.loss.item<double>() / static_cast<double>(train_.size());
    metrics.train_accuracy = totals.correct.item<double>() / static_cast<double>(train_.size());
    metrics.test_accuracy = evaluate_now().accuracy();
    return metrics;
  }

  const torch::nn::Module& module() const { return *net_; }

 private:
  Totals train(int number, double& seconds) {
    Totals totals(rank_.device());
    StepProgress progress{.epoch = number, .total = train_.size()};
    net_->train();
    rank_.barrier();
    synchronize(rank_.device());
    const auto start = Clock::now();
    auto reported = start;
    for (const auto& batch :
         batches(train_, {.size = options_.batch_size, .seed = options_.seed, .epoch = number}, rank_)) {
      if (callbacks_.stop.stop_requested()) throw Stopped();
      step(batch, totals);
      progress.done += batch.global_size;
      if (rank_.index() == 0 && (Clock::now() - reported > kProgressInterval || progress.done == progress.total)) {
        report(progress, totals, start);
        reported = Clock::now();
      }
    }
    synchronize(rank_.device());
    rank_.barrier();
    seconds = seconds_since(start);
    return totals;
  }

  void step(const Batch& batch, Totals& totals) {
    if (trace_ != nullptr) trace_->before_step(rank_);
    optimizer_.zero_grad();
    forward(batch, totals).backward();
    RECORD_USER_SCOPE("lockstep::update");
    optimizer_.step();
  }

  Loss forward(const Batch& batch, Totals& totals) {
    RECORD_USER_SCOPE("lockstep::forward");
    return net_.loss(batch, [&](const torch::Tensor& logits, const torch::Tensor& y) {
      const torch::Tensor loss = torch::nn::functional::cross_entropy(logits, y);
      totals.add(loss, logits, y);
      return loss;
    });
  }

  void report(StepProgress& progress, const Totals& totals, Clock::time_point start) const {
    if (!callbacks_.on_step) return;
    progress.seconds = seconds_since(start);
    progress.loss = totals.samples == 0 ? 0.0 : totals.loss.item<double>() / static_cast<double>(totals.samples);
    callbacks_.on_step(progress);
  }

  Score evaluate_now() {
    net_->eval();
    return evaluate(
        [&](const torch::Tensor& x) {
          if (callbacks_.stop.stop_requested()) throw Stopped();
          return net_(x);
        },
        test_, rank_);
  }

  const TrainOptions& options_;
  const TrainCallbacks& callbacks_;
  Rank& rank_;
  Trace* const trace_;  // null: none is wanted
  const Dataset train_;
  const Dataset test_;
  DataParallel<LeNetImpl> net_;
  torch::optim::SGD optimizer_;
};

}  // namespace

double TrainResult::seconds_per_epoch() const {
  if (history.empty()) return 0;
  const auto add = [](double sum, const EpochMetrics& metrics) { return sum + metrics.seconds; };
  return std::accumulate(history.begin(), history.end(), 0.0, add) / static_cast<double>(history.size());
}

TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks) {
  const TrainOptions settings = checked(options);
  RunFolder folder(this_process().index == 0 ? settings.run_dir : "");  // one process writes
  TrainResult result;
  result.devices = settings.devices;
  const ImageData data = load_data(settings);
  if (callbacks.stop.stop_requested()) {
    result.stopped = true;
    return result;
  }
  std::optional<Trace> trace;
  if (!settings.trace.empty()) trace.emplace(trace_file(settings.trace, this_process().index), settings.devices);
  folder.create(settings);
  if (callbacks.on_data) callbacks.on_data(data.source);
  const std::string title = settings.model + " on " + data.source + ", " + to_string(settings.devices) +
                            ", batch size " + std::to_string(settings.batch_size);

  const auto body = [&](Rank& rank) {
    RankTrainer trainer(settings, callbacks, data, rank, trace ? &*trace : nullptr);
    for (int number = 1; number <= settings.epochs; ++number) {
      const EpochMetrics metrics = trainer.epoch(number);
      if (rank.index_in_process() == 0) result.history.push_back(metrics);
      if (rank.index() != 0) continue;
      folder.write(result.history, trainer.module(), title, callbacks.on_warning);
      if (callbacks.on_epoch) callbacks.on_epoch(metrics);
    }
    if (trace) trace->end(rank);
  };
  try {
    run(settings.devices, body,
        {.threads_per_rank = settings.threads_per_rank, .configuration = common_settings(settings)});
  } catch (const Error& error) {
    if (!is_stop(error)) throw;
    result.stopped = true;
  }
  folder.finish(result.history, title, callbacks.on_warning);
  if (trace && !trace->written() && !result.stopped && callbacks.on_warning) {
    callbacks.on_warning(settings.trace.string() + " has no timeline: the run had no more than " +
                         std::to_string(kTraceAfterSteps) + " steps, which are not traced");
  }
  return result;
}

EvalResult evaluate_run(const std::filesystem::path& run_dir, const EvalOptions& options) {
  TrainOptions config = read_config(run_dir, options.devices.empty() ? default_devices() : options.devices);
  config.threads_per_rank = options.threads_per_rank;
  config.batch_size = options.batch_size;
  if (!options.data_dir.empty()) config.data_dir = options.data_dir;
  config = checked(config);
  if (!std::filesystem::exists(run_dir / kWeightsFile)) {
    throw Error("'" + run_dir.string() + "' holds no " + std::string(kWeightsFile) +
                ": the run ended before an epoch was done");
  }

  const ImageData data = load_data(config);
  EvalResult result;
  result.source = data.source;
  result.devices = config.devices;
  const auto body = [&](Rank& rank) {
    LeNet net(config.seed);
    load_weights(run_dir / kWeightsFile, *net);
    net->to(rank.device());
    net->eval();
    const Score score = evaluate([&](const torch::Tensor& x) { return net->forward(x); }, data.test.to(rank.device()),
                                 rank, config.batch_size);
    if (rank.index_in_process() == 0) static_cast<Score&>(result) = score;
  };
  run(config.devices, body, {.threads_per_rank = config.threads_per_rank, .configuration = common_settings(config)});
  return result;
}

}  // namespace lockstep
