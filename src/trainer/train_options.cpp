#include "train_options.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>
#include "data/parts.hpp"
#include "devices/check_devices.hpp"

#include "base/classic.hpp"
#include "batch_settings.hpp"
#include "flat_options.hpp"
#include "option_pairs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep {
namespace {

template <class Value>
void must_be(bool fits, const char* key, const Value& value, const std::string& rule) {
  if (fits) return;
  throw Error(classic_text("`", key, "` is ", value, "; it must be ", rule), {.options = {key}});
}

template <class Value>
void must_be_within(const char* key, const Value& value, const Value& least, const Value& most, const char* of = "") {
  must_be(value >= least && value <= most, key, value, classic_text("from ", least, " to ", most, of));
}

void check_batch(const BatchSettings& batch) {
  must_be(batch.size >= 1, "batch_size", batch.size, "at least 1");
  must_be_within<int64_t>("scale_batch", batch.scale, 1, std::numeric_limits<int64_t>::max() / batch.size);
  must_be_within<int64_t>("accumulate", batch.accumulate, 1, batch.global(), ", the samples of a batch");
  if (!batch.grain) return;
  must_be_within<int64_t>("grain", batch.grain->samples, 1, batch.global(),
                          ", the samples of a batch; leave it out for none");
  must_be_within("check_arithmetic", batch.grain->check_arithmetic, 0.0, 1.0);
}

void check_way(const TrainOptions& options) {
  const Way& way = options.way;
  if (const auto* const power_sgd = std::get_if<PowerSgd>(&way)) {
    must_be(power_sgd->rank >= 1, "compress_rank", power_sgd->rank, "at least 1");
  }
  if (std::holds_alternative<Sharded>(way)) must_be_within("zero_stage", flat(options).zero_stage, 0, 3);
  if (const auto* const local = std::get_if<LocalSgdOptions>(&way)) {
    must_be(local->sync_every >= 1, "sync_every", local->sync_every, "at least 1");
    must_be(local->outer_lr > 0 && !std::isinf(local->outer_lr), "outer_lr", local->outer_lr, "above 0");
    must_be(local->outer_momentum >= 0 && local->outer_momentum < 1, "outer_momentum", local->outer_momentum,
            "from 0 to below 1");
  }
}

// If a network is split, the data axis has the parts. Under a launcher the number of ranks is not known here; Batches
// checks it.
void check_shares_of(const TrainOptions& options) {
  const auto shares = shares_of(options.batch);
  if (shares.empty()) return;
  const int parts = this_process().count == 1 ? split_of(options, static_cast<int>(options.devices.size())).mesh.data
                                              : static_cast<int>(shares.size());
  check_shares(shares, parts, "`balance`", {.options = {"balance"}});
}

// Under a launcher the number of ranks is not known here; Mesh checks it.
void check_split_of(const TrainOptions& options) {
  const auto split = flat(options).split;
  if (!split) return;
  try {
    if (is_of_lockstep(options)) check_split(*split, static_cast<int64_t>(make_model(options.model)->size()));
    if (this_process().count == 1) check_mesh(split->mesh, static_cast<int>(options.devices.size()));
  } catch (const Error& error) {
    throw Error(error.what(), {.options = {"split"}});
  }
}

bool has_batchnorm(const ModelOptions& options) {
  const auto names = make_model(options)->named_buffers().keys();
  return std::any_of(names.begin(), names.end(), [](const auto& name) { return name.ends_with("running_mean"); });
}

}  // namespace

TrainOptions checked_for_fit(TrainOptions options) {
  constexpr int64_t a_million = 1'000'000;
  check_batch(options.batch);
  must_be(options.rate.reference_batch >= 0, "reference_batch", options.rate.reference_batch, "at least 0");
  learning_rate_of(options).check();
  check_optimizer(options.optimizer.kind, optimizer_settings(options));
  must_be_within("threads_per_rank", options.threads_per_rank, 1, 1024);  // the limit is far beyond any machine
  must_be_within<int64_t>("timeout", options.timeout.count(), 1, a_million, " seconds");
  must_be_within<int64_t>("silence", options.silence.count(), 0, a_million, " seconds");
  must_be(options.optimizer.clip >= 0, "clip", options.optimizer.clip, "above 0, or 0 for none");
  if (const auto& checkpoints = options.keep.checkpoints) {
    must_be(checkpoints->last >= 1, "keep_last", checkpoints->last, "at least 1; for none, reset keep.checkpoints");
    must_be(checkpoints->every >= 0, "checkpoint_every", checkpoints->every, "at least 0");
  }
  must_be(options.check_replicas >= -1, "check_replicas", options.check_replicas, "at least -1");
  check_way(options);
  if (const auto* const text = std::get_if<TextFile>(&options.data))
    must_be(!text->file.empty(), "text", text->file, "a file");
  fill_defaults(options);
  check_devices(options.devices);
  check_pairs({.options = options});
  check_split_of(options);
  check_shares_of(options);
  return options;
}

TrainOptions checked(TrainOptions options) {
  check_model(options.model);
  options = checked_for_fit(std::move(options));
  if (options.sync_batchnorm && is_of_lockstep(options) && !has_batchnorm(options.model)) {
    throw Error("`sync_batchnorm`: " + options.model.name + " has no BatchNorm; leave it out",
                {.options = {"sync_batchnorm"}});
  }
  return options;
}

bool is_of_lockstep(const TrainOptions& options) {
  const auto names = model_names();
  return std::find(names.begin(), names.end(), options.model.name) != names.end();
}

void fill_defaults(TrainOptions& options) {
  if (options.devices.empty()) options.devices = default_devices();
  if (!options.rate.lr) options.rate.lr = default_learning_rate(options.optimizer.kind);
  if (options.memory_format != MemoryFormat::automatic) return;
  options.memory_format = fast_memory_format(options.model, options.devices[0]) == at::MemoryFormat::ChannelsLast
                              ? MemoryFormat::channels_last
                              : MemoryFormat::contiguous;
}

ModelSplit split_of(const TrainOptions& options, int ranks) {
  return flat(options).split.value_or(ModelSplit{.mesh = {.data = ranks}});
}

LearningRate learning_rate_of(const TrainOptions& options) {
  return {.lr = options.rate.lr.value_or(default_learning_rate(options.optimizer.kind)),
          .batch = options.batch.global(),
          .reference_batch = options.rate.reference_batch == 0 ? options.batch.size : options.rate.reference_batch,
          .scaling = options.rate.scaling,
          .warmup_epochs = options.rate.warmup_epochs,
          .schedule = options.rate.schedule,
          .step_epochs = options.rate.step_epochs,
          .step_factor = options.rate.step_factor,
          .epochs = options.epochs};
}

OptimizerSettings optimizer_settings(const TrainOptions& options) {
  return {
      .lr = options.rate.lr, .momentum = options.optimizer.momentum, .weight_decay = options.optimizer.weight_decay};
}

void check_batch_size(const TrainOptions& options, int64_t samples, const std::string& source) {
  const int64_t size = options.batch.global();
  if (size <= samples) return;
  throw Error("the batch size is " + std::to_string(size) + "; it must be at most " + std::to_string(samples) +
                  ", the number of training samples in " + source,
              {.options = {"batch_size"}});
}

bool computes_in_bf16(const TrainOptions& options) {
  return options.precision == Precision::bf16;
}

at::MemoryFormat memory_format(const TrainOptions& options) {
  return options.memory_format == MemoryFormat::channels_last ? at::MemoryFormat::ChannelsLast
                                                              : at::MemoryFormat::Contiguous;
}

}  // namespace lockstep
