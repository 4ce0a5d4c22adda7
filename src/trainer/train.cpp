#include <lockstep/base/error.hpp>
#include <lockstep/models/weights.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "common_settings.hpp"
#include "data/data_digests.hpp"
#include "devices/gpu_math.hpp"
#include "rank_trainer.hpp"
#include "resume.hpp"
#include "run_folder.hpp"
#include "tensorboard_log.hpp"
#include "trace.hpp"
#include "train_options.hpp"

#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

namespace lockstep {
namespace {

bool goes_on_in_its_folder(const TrainOptions& options) {
  if (options.keep.resume.empty() || options.keep.run_dir.empty()) return false;
  std::error_code different;
  return std::filesystem::equivalent(run_to_go_on(options.keep.resume), options.keep.run_dir, different);
}

// Tells people that the data are not Fashion-MNIST's, if so.
std::string remark_on(const ImageData& data, const DataDigests& digests) {
  if (data.synthetic || is_fashion_mnist(digests)) return "";
  return has_images_of_mnist(digests) ? " (the digits of MNIST)" : " (not the images as published)";
}

std::string title_of_curve(const TrainOptions& options, const ImageData& data, const DataDigests& digests) {
  return to_string(options.model) + " on " +
         (data.synthetic ? data.source : std::string(to_string(options.data.source))) + remark_on(data, digests) +
         ", " + to_string(options.devices) + ", batch size " + std::to_string(options.batch.global());
}

void warn_of_mnist(const ImageData& data, const DataDigests& digests, const TrainCallbacks& callbacks) {
  if (!has_images_of_mnist(digests) || !callbacks.on_warning) return;
  callbacks.on_warning("the files in " + data.source +
                       " have Fashion-MNIST's names, but hold the digits of MNIST; if " +
                       "clothes are meant, put Fashion-MNIST's files there");
}

// Rank 0 reports on its thread, and any rank may warn on its own. Under a launcher one process reports.
TrainCallbacks one_at_a_time(const TrainCallbacks& callbacks, std::mutex& mutex) {
  const auto guarded = [&mutex]<class... Arguments>(const std::function<void(Arguments...)>& callback) {
    if (!callback) return callback;
    return std::function<void(Arguments...)>([&mutex, callback](Arguments... arguments) {
      const std::lock_guard lock(mutex);
      callback(arguments...);
    });
  };
  return {.on_data = guarded(callbacks.on_data),
          .on_step = guarded(callbacks.on_step),
          .on_epoch = guarded(callbacks.on_epoch),
          .on_warning = guarded(callbacks.on_warning),
          .stop = callbacks.stop};
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

TrainResult train(const TrainOptions& options, const TrainCallbacks& callers) {
  std::mutex mutex;
  const TrainCallbacks callbacks = one_at_a_time(callers, mutex);
  const TrainOptions settings = checked(options);
  const std::optional<RunState> resumed = resumed_state(settings, callbacks.on_warning);
  RunFolder folder(this_process().index == 0 ? settings.keep.run_dir : "",  // one process writes
                   goes_on_in_its_folder(settings));
  TrainResult result;
  result.devices = settings.devices;
  if (resumed) result.history = resumed->history;
  const ImageData data = load_data(settings.data);
  check_batch_size(settings, data);
  const DataDigests digests = digests_of(data);
  if (resumed) check_fits(*resumed, settings, data, digests);
  if (callbacks.stop.stop_requested()) {
    result.stopped = true;
    return result;
  }
  std::optional<Trace> trace;
  if (!settings.keep.trace.empty())
    trace.emplace(trace_file(settings.keep.trace, this_process().index), settings.devices);
  folder.create(settings);
  if (callbacks.on_data) callbacks.on_data(data.source + remark_on(data, digests));
  warn_of_mnist(data, digests, callbacks);
  const std::string title = title_of_curve(settings, data, digests);

  std::optional<TensorBoardLog> board;
  if (settings.keep.tensorboard && !settings.keep.run_dir.empty()) board.emplace(settings.keep.run_dir);
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
      EpochMetrics metrics = trainer.epoch(number, keep);
      if (!trainer.not_finite().empty()) {
        if (rank.index_in_process() == 0) not_finite = trainer.not_finite();
        break;
      }
      const torch::nn::Sequential net = trainer.whole();
      if (rank.index_in_process() == 0) {
        metrics.weights = weights_hash(*net);
        result.history.push_back(metrics);
      }
      if (rank.index() == 0) folder.write(result.history, *net, title, callbacks.on_warning);
      if (rank.index() == 0 && board) board->write(metrics, metrics.lr, data.train.size(), trainer.waits());
      if (keep) keep();
      if (rank.index() == 0 && callbacks.on_epoch) callbacks.on_epoch(metrics);
    }
    if (trace) trace->end(rank);
  };
  // Batches have one shape, but for the last of an epoch. Trials of cuDNN's algorithms may end otherwise each time, so
  // with a grain there are none.
  const GpuMath math(settings.precision == Precision::tf32,
                     /*fixed_shapes=*/settings.devices[0].is_cuda() && settings.batch.grain == 0);
  try {
    run(settings.devices, body,
        {.threads_per_rank = settings.threads_per_rank,
         .timeout = settings.timeout,
         .stop = callbacks.stop,
         .silence = settings.silence,
         .configuration = common_settings(settings, digests, resumed ? &*resumed : nullptr),
         .seed = settings.seed,
         .on_warning = callbacks.on_warning ? callbacks.on_warning : [](const std::string&) {}});
  } catch (const Stopped&) {
    result.stopped = true;
  }
  folder.finish(result.history, title, callbacks.on_warning);
  if (!not_finite.empty()) throw NotFinite(not_finite);
  if (trace && !trace->written() && !result.stopped && callbacks.on_warning) {
    callbacks.on_warning(settings.keep.trace.string() + " has no timeline: the run had no more than " +
                         std::to_string(kTraceAfterSteps) + " steps, which are not traced");
  }
  return result;
}

}  // namespace lockstep
