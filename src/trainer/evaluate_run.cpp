#include <lockstep/base/error.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "batch_settings.hpp"
#include "common_settings.hpp"
#include "devices/gpu_math.hpp"
#include "evaluation.hpp"
#include "measures.hpp"
#include "train_options.hpp"
#include "workload.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace lockstep {

namespace {

// The kinds of DataSource, in its order: the option that names such data, and what they are.
constexpr std::pair<const char*, const char*> kinds[] = {
    {"data_dir", "Fashion-MNIST"}, {"data", "synthetic images"}, {"text", "a text"}};

// Takes the network's settings, and none of its training. Evaluation may use other devices and other batches.
TrainOptions evaluation_settings(const std::filesystem::path& run_dir, const EvalOptions& options) {
  const TrainOptions trained = read_config(run_dir, options.devices.empty() ? default_devices() : options.devices);
  if (!is_of_lockstep(trained)) {
    throw Error("'" + run_dir.string() + "' is a run of \"" + trained.model.name +
                    "\", whose network lockstep does not have; the program that trained it can load its " +
                    kWeightsFile + " and evaluate it",
                {.options = {"model"}});
  }
  TrainOptions config;
  config.model = trained.model;
  config.seed = trained.seed;
  config.data = trained.data;
  if (options.data) {
    if (options.data->index() != trained.data.index()) {
      const char* const key = kinds[options.data->index()].first;
      throw Error("`" + std::string(key) + "`: the run in '" + run_dir.string() + "' learned " +
                      kinds[trained.data.index()].second + "; leave it out",
                  {.options = {key}});
    }
    config.data = *options.data;
  }
  config.devices = trained.devices;
  config.threads_per_rank = options.threads_per_rank;
  config.batch.size = std::max(options.batch_size, grain_of(trained.batch));  // the size does not change the result
  if (trained.batch.grain) config.batch.grain = trained.batch.grain->samples;
  config.precision = trained.precision;
  config.memory_format = trained.memory_format;
  return checked(config);
}

}  // namespace

EvalResult evaluate_run(const std::filesystem::path& run_dir, const EvalOptions& options) {
  const TrainOptions config = evaluation_settings(run_dir, options);
  if (!std::filesystem::exists(run_dir / kWeightsFile)) {
    throw Error(
        "'" + run_dir.string() + "' holds no " + std::string(kWeightsFile) + ": the run ended before an epoch was done",
        {Error::file, {}, {"run_dir"}});
  }

  const Workload data = workload_of(config);
  EvalResult result;
  result.source = data.task.source;
  result.devices = config.devices;
  result.counts_answers = data.task.accuracy;
  const auto body = [&](Rank& rank) {
    torch::nn::Sequential net = make_model(config.model, config.seed);
    load_weights(run_dir / kWeightsFile, *net);
    net->to(rank.device());
    set_memory_format(*net, memory_format(config));
    net->eval();
    const auto forward =
        evaluation_forward(config, rank.device(), [&](const Batch& batch) { return net->forward(batch.x); });
    EpochMetrics metrics;
    const auto means = measure(forward, data.task.test.to(rank.device()), measures_of(data.task), rank,
                               config.batch.size, grain_of(config.batch));
    put_measures(means, data.task, metrics);
    if (rank.index_in_process() != 0) return;
    result.total = data.task.test.size();
    result.loss = metrics.test["loss"];
    if (data.task.accuracy) result.correct = std::llround(metrics.test_accuracy * static_cast<double>(result.total));
    if (data.task.perplexity) result.perplexity = metrics.test["perplexity"];
    result.weights = weights_hash(*net);
  };
  const GpuMath math({.tf32 = config.precision == Precision::tf32, .reproducible = config.batch.grain.has_value()});
  // One process has nobody to compare its data with.
  const bool compares = this_process().count > 1;
  run(config.devices, body,
      {.threads_per_rank = config.threads_per_rank,
       .configuration = compares ? common_settings(config, data.digests) : ""});
  return result;
}

}  // namespace lockstep
