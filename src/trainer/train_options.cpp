#include "train_options.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>
#include "data/parts.hpp"
#include "devices/check_devices.hpp"

#include "base/classic.hpp"
#include "batch_settings.hpp"
#include "exchange_options.hpp"
#include "grain.hpp"

#include <algorithm>

namespace lockstep {
namespace {

constexpr int max_threads_per_rank = 1024;  // far beyond any machine, and few enough for the system to start them

// If a network is split, the data axis has the parts.
void check_balance(const TrainOptions& options) {
  const auto shares = shares_of(options.batch);
  const int parts = options.split ? options.split->mesh.data : static_cast<int>(options.devices.size());
  if (!shares.empty()) {  // under a launcher the number of ranks is not known here; Batches checks it
    return check_shares(shares, this_process().count == 1 ? parts : static_cast<int>(shares.size()), "`balance`");
  }
  if (!balances(options.batch)) return;
  const auto refuse = [](const std::string& why) {
    throw Error("`balance` auto " + why + "; leave one of the two out, or give the shares, as in `balance` 2,1");
  };
  if (options.cuda_graph) refuse("changes the sizes of the devices' parts, and `cuda_graph` records steps of one size");
  if (options.sync_batchnorm) {
    refuse("measures how long each device computes, and with `sync_batchnorm` devices wait for each other meanwhile");
  }
  if (options.exchange.zero_stage > 1) {
    refuse("measures how long each device computes, and with `zero_stage` " +
           std::to_string(options.exchange.zero_stage) + " devices wait for each other meanwhile");
  }
  if (options.exchange.sync_every > 0) {
    refuse("keeps short what devices wait for each other at every step, and with `sync_every` they do not wait there");
  }
  if (options.split && !by_data_alone(*options.split)) {
    refuse("measures how long each device computes, and in a network that is split as " + to_string(*options.split) +
           " devices wait for each other meanwhile");
  }
}

// A graph repeats a step with the numbers that it was recorded with.
void check_graph_of(const TrainOptions& options) {
  if (!options.cuda_graph) return;
  if (!options.devices[0].is_cuda()) {
    throw Error("`cuda_graph` needs CUDA devices, and this run is on " + to_string(options.devices));
  }
  const bool drops = options.model.name == "alexnet" ? options.model.dropout > 0 : options.model.residual_dropout > 0;
  if (is_of_lockstep(options) && drops) {
    throw Error(
        "`cuda_graph` records a step's dropout, and would drop the same in each; leave one of the two out, as in "
        "`dropout` 0 or `residual_dropout` 0");
  }
  if (options.batch.accumulate == 1) return;
  throw Error(
      "`cuda_graph` records steps that compute a batch at once, and `accumulate` computes it in parts; leave one out");
}

// Under a launcher the number of ranks is not known here; Mesh checks it.
void check_split_of(const TrainOptions& options) {
  if (!options.split) return;
  const ModelSplit& split = *options.split;
  if (is_of_lockstep(options)) check_split(split, static_cast<int64_t>(make_model(options.model)->size()));
  if (this_process().count == 1) check_mesh(split.mesh, static_cast<int>(options.devices.size()));
  if (options.cuda_graph && !by_data_alone(split)) {
    throw Error("`cuda_graph` records steps whose network is split by data alone, and this run's is split as " +
                to_string(split) + "; leave one of the two out");
  }
  if (options.batch.accumulate > 1 && (split.stages() > 1 || split.microbatches > 1)) {
    throw Error("`accumulate` computes a batch in parts, and so does this run's pipeline, in microbatches (" +
                to_string(split) + "); leave `accumulate` out, or take a split with more of them");
  }
  if (needs_whole_layers(options.optimizer.kind) && split.mesh.tensor > 1) {
    throw Error(std::string(to_string(options.optimizer.kind)) +
                " scales a layer's update by the norm of the whole layer, and where the network is " +
                "split by channels (" + to_string(split) +
                ") a rank holds slices of layers; take sgd, adam or adamw, or a split by data and layers");
  }
}

void check_on_nan(const TrainOptions& options) {
  if (options.on_nan != OnNan::skip) return;
  const auto refuse = [](const std::string& why) {
    throw Error("`on_nan` skip leaves out a step that is not finite, and " + why + "; take stop, or leave one out");
  };
  if (options.cuda_graph) refuse("`cuda_graph` goes on before the device has told whether it is");
  if (options.exchange.sync_every > 0) refuse("with `sync_every` devices do not learn of each other's steps");
  if (options.exchange.compress == Compression::powersgd)
    refuse("`compress` powersgd keeps what it left out of it for the next one");
}

bool has_batchnorm(const ModelOptions& options) {
  const auto names = make_model(options)->named_buffers().keys();
  return std::any_of(names.begin(), names.end(), [](const auto& name) { return name.ends_with("running_mean"); });
}

// SyncBatchNorm exchanges in the middle of forward and backward.
void check_sync_batchnorm(const TrainOptions& options) {
  if (!options.sync_batchnorm) return;
  if (options.cuda_graph) {
    throw Error(
        "`sync_batchnorm` exchanges statistics within the steps that `cuda_graph` records; leave one of the two out");
  }
  if (options.split && !by_data_alone(*options.split)) {
    throw Error("`sync_batchnorm` normalises over whole batches, and this run's network is split as " +
                to_string(*options.split) + ", not by data alone; leave one of the two out");
  }
  if (options.batch.accumulate > 1) {
    throw Error(
        "`sync_batchnorm` normalises over whole batches, and `accumulate` computes them in parts; leave one out");
  }
  if (is_of_lockstep(options) && !has_batchnorm(options.model)) {
    throw Error("`sync_batchnorm`: " + options.model.name + " has no BatchNorm; leave it out");
  }
}

// A model learns images or a text.
void check_data_of_model(const TrainOptions& options) {
  const DataOptions& data = options.data;
  const std::string& model = options.model.name;
  if (!learns_text(options.model)) {
    if (data.text.empty()) return;
    throw Error("`text` is for `model` gpt, and " + model + " learns classes of images; leave `text` out");
  }
  if (data.source != DataOptions().source || !data.folder.empty())
    throw Error(model + " learns from a text; leave `data` and `data_dir` out");
  if (data.text.empty()) throw Error(model + " learns the next byte of a text; give one with `text`, any file");
  if (options.memory_format == MemoryFormat::channels_last)
    throw Error("`memory_format` channels-last is for images, and " + model + " has none; leave it out");
}

// All but the network and the data.
TrainOptions checked_settings(TrainOptions options) {
  const auto refuse = [](const std::string& what, const auto& value, const std::string& rule) {
    Classic<std::ostringstream> text;
    text << what << " is " << value << "; " << rule;
    throw Error(text.str());
  };
  check_batch(options.batch);
  if (options.rate.reference_batch < 0)
    refuse("the reference batch", options.rate.reference_batch, "it must be at least 1");
  learning_rate_of(options).check();
  check_optimizer(options.optimizer.kind, optimizer_settings(options));
  if (options.threads_per_rank < 1 || options.threads_per_rank > max_threads_per_rank)
    refuse("the number of threads per rank", options.threads_per_rank, "it must be from 1 to 1024");
  if (options.timeout.count() < 1 || options.timeout.count() > 1'000'000)
    refuse("the timeout in seconds", options.timeout.count(), "it must be from 1 to 1000000");
  if (options.silence.count() < 0 || options.silence.count() > 1'000'000)
    refuse("the silence in seconds", options.silence.count(), "it must be from 0 to 1000000");
  if (!(options.optimizer.clip >= 0))
    refuse("the largest norm of the gradients", options.optimizer.clip, "it must be above 0, or 0 for none");
  if (options.keep.last < 0) refuse("the number of checkpoints to keep", options.keep.last, "it must be at least 0");
  if (options.write_text < 0)
    refuse("the number of bytes to write after an epoch", options.write_text, "it must be at least 0");
  if (options.keep.every < 0)
    refuse("the number of steps between checkpoints", options.keep.every, "it must be at least 0");
  if (options.check_replicas < -1)
    refuse("the number of steps between comparisons of the weights", options.check_replicas, "it must be at least -1");
  if (options.keep.every > 0 && options.keep.last == 0)
    throw Error("`checkpoint_every` writes checkpoints, and `keep_last` 0 keeps none; leave one of the two out");
  if (options.data.source == DataSource::synthetic && !options.data.folder.empty())
    throw Error("`data_dir` goes with `data` fashion-mnist; synthetic data need no files");
  fill_defaults(options);
  check_devices(options.devices);
  if (options.precision == Precision::tf32 && !options.devices[0].is_cuda()) {
    throw Error("`precision` tf32 is how NVIDIA GPUs multiply, and this run is on " + to_string(options.devices) +
                "; take float32 or bf16");
  }
  check_graph_of(options);
  check_split_of(options);
  check_sync_batchnorm(options);
  check_exchange(options);
  check_balance(options);
  check_on_nan(options);
  check_grain(options);
  return options;
}

}  // namespace

TrainOptions checked(TrainOptions options) {
  check_model(options.model);
  check_data_of_model(options);
  return checked_settings(std::move(options));
}

TrainOptions checked_for_fit(TrainOptions options) {
  return checked_settings(std::move(options));
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

bool by_data_alone(const ModelSplit& split) {
  return split.stages() == 1 && split.mesh.tensor == 1 && split.microbatches == 1;
}

ModelSplit split_of(const TrainOptions& options, int ranks) {
  return options.split.value_or(ModelSplit{.mesh = {.data = ranks}});
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
              ", the number of training samples in " + source);
}

bool computes_in_bf16(const TrainOptions& options) {
  return options.precision == Precision::bf16;
}

at::MemoryFormat memory_format(const TrainOptions& options) {
  return options.memory_format == MemoryFormat::channels_last ? at::MemoryFormat::ChannelsLast
                                                              : at::MemoryFormat::Contiguous;
}

}  // namespace lockstep
