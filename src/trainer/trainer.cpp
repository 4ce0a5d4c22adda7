#include <lockstep/base/error.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/models/checkpoint.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/optim/optimizers.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "data/data_digests.hpp"
#include "devices/gpu_math.hpp"
#include "devices/memory_format.hpp"
#include "option_table.hpp"
#include "option_text.hpp"
#include "rank_trainer.hpp"
#include "resume.hpp"
#include "run_folder.hpp"
#include "tensorboard_log.hpp"
#include "trace.hpp"
#include "train_options.hpp"

#include <exception>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {
namespace {

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

bool keeps_checkpoints(const TrainOptions& options) {
  return !options.run_dir.empty() && options.keep_last > 0;
}

bool goes_on_in_its_folder(const TrainOptions& options) {
  if (options.resume.empty() || options.run_dir.empty()) return false;
  std::error_code different;
  return std::filesystem::equivalent(run_to_go_on(options.resume), options.run_dir, different);
}

// What all processes of a launcher must have in common: all that shapes their steps. run() compares the seed.
std::string common_settings(const TrainOptions& options, const DataDigests& data, const RunState* resumed = nullptr) {
  std::string text = options.trace.empty() ? "not traced" : "traced";
  each_option(options, [&](const Option& option, const auto& value) {
    if (option.same == Same::nowhere || option.key == std::string_view("seed")) return;
    text += std::string(", ") + option.key + " " + option_text(value);
  });
  if (keeps_checkpoints(options)) text += ", checkpoints every " + std::to_string(options.checkpoint_every) + " steps";
  if (resumed != nullptr) {
    text += ", resumed " + std::to_string(resumed->steps) + " steps after epoch " + std::to_string(resumed->epochs);
  }
  for (const auto& part : kDataParts) text += std::string(", ") + part.name + " of SHA-256 " + data.*part.digest;
  return text;
}

// For people: unless the data are Fashion-MNIST's, that they are not.
std::string remark_on(const ImageData& data, const DataDigests& digests) {
  if (data.synthetic || is_fashion_mnist(digests)) return "";
  return has_images_of_mnist(digests) ? " (the digits of MNIST)" : " (not the images as published)";
}

std::string title_of_curve(const TrainOptions& options, const ImageData& data, const DataDigests& digests) {
  return to_string(model_options(options)) + " on " +
         (data.synthetic ? data.source : std::string(to_string(options.data))) + remark_on(data, digests) + ", " +
         to_string(options.devices) + ", batch size " + std::to_string(global_batch(options));
}

void warn_of_mnist(const ImageData& data, const DataDigests& digests, const TrainCallbacks& callbacks) {
  if (!has_images_of_mnist(digests) || !callbacks.on_warning) return;
  callbacks.on_warning("the files in " + data.source +
                       " have Fashion-MNIST's names, but hold the digits of MNIST; if " +
                       "clothes are meant, put Fashion-MNIST's files there");
}

}  // namespace

double TrainResult::seconds_per_epoch() const {
  if (history.empty()) return 0;
  const auto add = [](double sum, const EpochMetrics& metrics) { return sum + metrics.seconds; };
  return std::accumulate(history.begin(), history.end(), 0.0, add) / static_cast<double>(history.size());
}

double TrainResult::data_wait() const {
  double waited = 0, all = 0;
  for (const auto& metrics : history) {
    waited += metrics.data_wait * metrics.seconds;
    all += metrics.seconds;
  }
  return all == 0 ? 0 : waited / all;
}

TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks) {
  const TrainOptions settings = checked(options);
  const std::optional<RunState> resumed = resumed_state(settings, callbacks.on_warning);
  RunFolder folder(this_process().index == 0 ? settings.run_dir : "",  // one process writes
                   goes_on_in_its_folder(settings));
  TrainResult result;
  result.devices = settings.devices;
  if (resumed) result.history = resumed->history;
  const ImageData data = load_data(settings);
  check_batch_size(settings, data);
  const DataDigests digests = digests_of(data);
  if (resumed) check_fits(*resumed, settings, data, digests);
  if (callbacks.stop.stop_requested()) {
    result.stopped = true;
    return result;
  }
  std::optional<Trace> trace;
  if (!settings.trace.empty()) trace.emplace(trace_file(settings.trace, this_process().index), settings.devices);
  folder.create(settings);
  if (callbacks.on_data) callbacks.on_data(data.source + remark_on(data, digests));
  warn_of_mnist(data, digests, callbacks);
  const std::string title = title_of_curve(settings, data, digests);

  std::optional<TensorBoardLog> board;
  if (settings.tensorboard && !settings.run_dir.empty()) board.emplace(settings.run_dir);
  std::string not_finite;  // why the run ends, if so
  const auto body = [&](Rank& rank) {
    RankTrainer trainer(settings, callbacks, data, rank, trace ? &*trace : nullptr,
                        settings.cuda_graph ? make_cuda_graph() : nullptr, resumed ? &*resumed : nullptr);
    const auto keep_state = [&] {
      RunState state = trainer.state();
      if (rank.index() != 0) return;
      state.epochs = static_cast<int>(result.history.size());
      state.history = result.history;
      state.config = to_json(settings);
      state.data = digests;
      folder.keep(state);
    };
    const std::function<void()> keep = keeps_checkpoints(settings) ? keep_state : std::function<void()>();
    for (int number = resumed ? resumed->epochs + 1 : 1; number <= settings.epochs; ++number) {
      const EpochMetrics metrics = trainer.epoch(number, keep);
      if (!trainer.not_finite().empty()) {
        if (rank.index_in_process() == 0) not_finite = trainer.not_finite();
        break;
      }
      const torch::nn::Sequential net = trainer.whole();
      if (rank.index_in_process() == 0) result.history.push_back(metrics);
      if (rank.index() == 0) folder.write(result.history, *net, title, callbacks.on_warning);
      if (rank.index() == 0 && board) board->write(metrics, metrics.lr, data.train.size(), trainer.waits());
      if (keep) keep();
      if (rank.index() == 0 && callbacks.on_epoch) callbacks.on_epoch(metrics);
    }
    if (trace) trace->end(rank);
  };
  // Batches have one shape, but for the last of an epoch.
  const GpuMath math(settings.precision == Precision::tf32, /*fixed_shapes=*/settings.devices[0].is_cuda());
  try {
    run(settings.devices, body,
        {.threads_per_rank = settings.threads_per_rank,
         .timeout = settings.timeout,
         .stop = callbacks.stop,
         .silence = settings.silence,
         .configuration = common_settings(settings, digests, resumed ? &*resumed : nullptr),
         .seed = settings.seed});
  } catch (const Error& error) {
    if (!is_stop(error)) throw;
    result.stopped = true;
  }
  folder.finish(result.history, title, callbacks.on_warning);
  if (!not_finite.empty()) throw NotFinite(not_finite);
  if (trace && !trace->written() && !result.stopped && callbacks.on_warning) {
    callbacks.on_warning(settings.trace.string() + " has no timeline: the run had no more than " +
                         std::to_string(kTraceAfterSteps) + " steps, which are not traced");
  }
  return result;
}

EvalResult evaluate_run(const std::filesystem::path& run_dir, const EvalOptions& options) {
  const TrainOptions trained = read_config(run_dir, options.devices.empty() ? default_devices() : options.devices);
  // What the network is, and no setting of its training: evaluation may be on other devices, by other batches.
  const TrainOptions config = checked({.model = trained.model,
                                       .width = trained.width,
                                       .image_size = trained.image_size,
                                       .groups = trained.groups,
                                       .dropout = trained.dropout,
                                       .data = trained.data,
                                       .data_dir = options.data_dir.empty() ? trained.data_dir : options.data_dir,
                                       .devices = trained.devices,
                                       .threads_per_rank = options.threads_per_rank,
                                       .batch_size = options.batch_size,
                                       .seed = trained.seed,
                                       .precision = trained.precision,
                                       .memory_format = trained.memory_format});
  if (!std::filesystem::exists(run_dir / kWeightsFile)) {
    throw Error("'" + run_dir.string() + "' holds no " + std::string(kWeightsFile) +
                ": the run ended before an epoch was done");
  }

  const ImageData data = load_data(config);
  EvalResult result;
  result.source = data.source;
  result.devices = config.devices;
  const auto body = [&](Rank& rank) {
    torch::nn::Sequential net = make_model(model_options(config));
    load_weights(run_dir / kWeightsFile, *net);
    net->to(rank.device());
    set_memory_format(*net, memory_format(config));
    net->eval();
    const auto forward = [&](const torch::Tensor& x) {
      const Autocast precision(rank.device(), torch::kBFloat16, computes_in_bf16(config));
      return net->forward(x.contiguous(memory_format(config))).to(torch::kFloat);  // for the loss of a whole batch
    };
    const Score score = evaluate(forward, data.test.to(rank.device()), rank, config.batch_size);
    if (rank.index_in_process() == 0) static_cast<Score&>(result) = score;
  };
  const GpuMath math(config.precision == Precision::tf32, /*fixed_shapes=*/false);
  // One process has nobody to compare its data with.
  const bool compares = this_process().count > 1;
  run(config.devices, body,
      {.threads_per_rank = config.threads_per_rank,
       .configuration = compares ? common_settings(config, digests_of(data)) : ""});
  return result;
}

}  // namespace lockstep
