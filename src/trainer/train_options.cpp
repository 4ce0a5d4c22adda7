#include "train_options.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/data/shares.hpp>
#include <lockstep/ranks/rank.hpp>
#include <nlohmann/json.hpp>

#include "communication_options.hpp"
#include "io/json_fields.hpp"
#include "layout/split_json.hpp"
#include "option_table.hpp"
#include "option_text.hpp"

#include <algorithm>
#include <limits>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <variant>

namespace lockstep {
namespace {

using nlohmann::json;

constexpr int max_threads_per_rank = 1024;  // far beyond any machine, and few enough for the system to start them

template <class Value>
nlohmann::ordered_json json_of(const Value& value) {
  if constexpr (std::is_same_v<Value, std::optional<ModelSplit>>) {
    return to_json(*value);
  } else if constexpr (std::is_arithmetic_v<Value> || std::is_same_v<Value, std::vector<int>>) {
    return value;
  } else {
    return option_text(value);
  }
}

template <class Value>
void read(JsonFields& fields, const char* key, Value& value) {
  if constexpr (std::is_same_v<Value, std::optional<ModelSplit>>) {
    auto split = fields.object(key);
    value = split_from(split);
    split.no_more();
  } else if constexpr (std::is_same_v<Value, std::vector<int>>) {
    value = fields.list<int>(key);
  } else if constexpr (std::is_arithmetic_v<Value>) {
    value = fields.required<Value>(key);
  } else {
    value = fields.named(key, [&](const std::string& text) {
      Value named = value;
      take_text(text, named);
      return named;
    });
  }
}

void check_batch(const TrainOptions& options) {
  const auto refuse = [](const std::string& what, int64_t value, const std::string& rule) {
    throw Error(what + " is " + std::to_string(value) + "; it must be " + rule);
  };
  if (options.batch_size < 1) refuse("the batch size", options.batch_size, "at least 1");
  const int64_t most = std::numeric_limits<int64_t>::max() / options.batch_size;
  if (options.scale_batch < 1 || options.scale_batch > most) {
    refuse("the factor of the batch size (`scale_batch`)", options.scale_batch, "from 1 to " + std::to_string(most));
  }
  if (options.reference_batch < 0) refuse("the reference batch", options.reference_batch, "at least 1");
  if (options.accumulate < 1 || options.accumulate > global_batch(options)) {
    refuse("the number of parts of a batch (`accumulate`)", options.accumulate,
           "from 1 to " + std::to_string(global_batch(options)) + ", the samples of a batch");
  }
}

// Of a network that is split, the data axis has the parts.
void check_balance(const TrainOptions& options) {
  const auto shares = shares_of(options);
  const int parts = options.split ? options.split->mesh.data : static_cast<int>(options.devices.size());
  if (!shares.empty()) {  // under a launcher the number of ranks is not known here; Batches checks it
    return check_shares(shares, this_process().count == 1 ? parts : static_cast<int>(shares.size()), "`balance`");
  }
  if (!balances(options)) return;
  const auto refuse = [](const std::string& why) {
    throw Error("`balance` auto " + why + "; leave one of the two out, or give the shares, as in `balance` 2,1");
  };
  if (options.cuda_graph) refuse("changes the sizes of the devices' parts, and `cuda_graph` records steps of one size");
  if (options.sync_batchnorm) {
    refuse("measures how long each device computes, and with `sync_batchnorm` devices wait for each other meanwhile");
  }
  if (options.zero_stage == 2) {
    refuse("measures how long each device computes, and with `zero_stage` 2 devices wait for each other meanwhile");
  }
  if (options.sync_every > 0) {
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
  if (options.model == "alexnet" && options.dropout > 0) {
    throw Error(
        "`cuda_graph` records a step's dropout, and would drop the same in each; leave one of the two out, as in "
        "`dropout` 0");
  }
  const bool same_rate = options.warmup == 0 && options.schedule == LrSchedule::constant;
  if (is_plain_sgd(options) && same_rate && options.accumulate == 1 && options.clip == 0) return;
  throw Error(
      "`cuda_graph` records steps of plain sgd at a constant learning rate, without `momentum`, `weight_decay`, "
      "`clip`, `accumulate`, `warmup` and `schedule`; leave it out for the others");
}

// Under a launcher the number of ranks is not known here; Mesh checks it.
void check_split_of(const TrainOptions& options) {
  if (!options.split) return;
  const ModelSplit& split = *options.split;
  check_split(split, static_cast<int64_t>(make_model(model_options(options))->size()));
  if (this_process().count == 1) check_mesh(split.mesh, static_cast<int>(options.devices.size()));
  if (options.cuda_graph && !by_data_alone(split)) {
    throw Error("`cuda_graph` records steps whose network is split by data alone, and this run's is split as " +
                to_string(split) + "; leave one of the two out");
  }
  if (options.accumulate > 1 && (split.stages() > 1 || split.microbatches > 1)) {
    throw Error("`accumulate` computes a batch in parts, and so does this run's pipeline, in microbatches (" +
                to_string(split) + "); leave `accumulate` out, or take a split with more of them");
  }
  if (needs_whole_layers(options.optimizer) && split.mesh.tensor > 1) {
    throw Error(std::string(to_string(options.optimizer)) +
                " scales a layer's update by the norm of the whole layer, and where the network is " +
                "split by channels (" + to_string(split) +
                ") a rank holds slices of layers; take sgd, adam or adamw, or a split by data and layers");
  }
}

void check_zero(const TrainOptions& options) {
  const int stage = options.zero_stage;
  if (stage < 0 || stage > 2) {
    throw Error("the stage of ZeRO (`zero_stage`) is " + std::to_string(stage) +
                "; it must be 0 (off), 1 (optimizer state) or 2 (and gradients)");
  }
  if (stage == 0) return;
  if (needs_whole_layers(options.optimizer)) {
    throw Error("`zero_stage` gives each rank a slice of the parameters, and " +
                std::string(to_string(options.optimizer)) +
                " scales a layer's update by the norm of the whole layer; take sgd, adam or adamw, or leave it out");
  }
  if (options.cuda_graph) {
    throw Error(
        "`zero_stage` exchanges parameters behind the steps that `cuda_graph` records; leave one of the two out");
  }
  if (stage == 2 && options.sync_batchnorm) {
    throw Error(
        "`zero_stage` 2 waits for other devices within backward, and so does `sync_batchnorm`; take 1, or leave one of "
        "the two out");
  }
  if (options.compress != Compression::none || options.sync_every > 0) {
    throw Error(
        "`zero_stage` exchanges gradients in its own way, of which `compress` and `sync_every` know nothing; "
        "leave it or them out");
  }
  if (options.split && !by_data_alone(*options.split)) {
    throw Error("`zero_stage` shares out what ranks split by data have in common, and this run's network is split as " +
                to_string(*options.split) + "; leave one of the two out");
  }
}

void check_on_nan(const TrainOptions& options) {
  if (options.on_nan != OnNan::skip) return;
  const auto refuse = [](const std::string& why) {
    throw Error("`on_nan` skip leaves out a step that is not finite, and " + why + "; take stop, or leave one out");
  };
  if (options.cuda_graph) refuse("`cuda_graph` has recorded the update with the step");
  if (options.sync_every > 0) refuse("with `sync_every` devices do not learn of each other's steps");
  if (options.compress == Compression::powersgd)
    refuse("`compress` powersgd keeps what it left out of it for the next one");
}

bool has_batchnorm(const ModelOptions& options) {
  const auto names = make_model(options)->named_buffers().keys();
  return std::any_of(names.begin(), names.end(), [](const auto& name) { return name.ends_with("running_mean"); });
}

// It exchanges in the middle of forward and backward.
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
  if (options.accumulate > 1) {
    throw Error(
        "`sync_batchnorm` normalises over whole batches, and `accumulate` computes them in parts; leave one out");
  }
  if (!has_batchnorm(model_options(options))) {
    throw Error("`sync_batchnorm`: " + options.model + " has no BatchNorm; leave it out");
  }
}

}  // namespace

std::string to_json(const TrainOptions& options) {
  nlohmann::ordered_json config;
  each_option(options, [&](const Option& option, const auto& value) {
    const bool absent = option.key == std::string_view("split") && !options.split;
    if (option.more.kept && !absent) config[option.key] = json_of(value);
  });
  try {
    return config.dump(2) + "\n";
  } catch (const json::exception&) {  // all else is numbers and names
    throw Error("configuration: a path is not UTF-8, so that it cannot be kept: data_dir is '" +
                options.data_dir.string() + "', run_dir is '" + options.run_dir.string() + "'");
  }
}

TrainOptions train_options_from_json(const std::string& text, const Devices& devices) {
  auto fields = JsonFields::parse(text, "configuration");
  TrainOptions options;
  each_option(options, [&](const Option& option, auto& value) {
    if (!option.more.kept || !fields.has(option.key)) return;
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Devices>) {
      if (fields.required<std::string>(option.key).empty() || !devices.empty()) return;
    }
    read(fields, option.key, value);
  });
  fields.no_more();
  if (!devices.empty()) options.devices = devices;
  return options;
}

TrainOptions checked(TrainOptions options) {
  const auto refuse = [](const std::string& what, const auto& value, const std::string& rule) {
    std::ostringstream text;
    text << what << " is " << value << "; " << rule;
    throw Error(text.str());
  };
  check_model(model_options(options));
  check_batch(options);
  check_learning_rate(learning_rate_of(options));
  check_optimizer(options.optimizer, optimizer_settings(options));
  if (options.threads_per_rank < 1 || options.threads_per_rank > max_threads_per_rank)
    refuse("the number of threads per rank", options.threads_per_rank, "it must be from 1 to 1024");
  if (options.timeout.count() < 1 || options.timeout.count() > 1'000'000)
    refuse("the timeout in seconds", options.timeout.count(), "it must be from 1 to 1000000");
  if (options.silence.count() < 1 || options.silence.count() > 1'000'000)
    refuse("the silence in seconds", options.silence.count(), "it must be from 1 to 1000000");
  if (!(options.clip >= 0))
    refuse("the largest norm of the gradients", options.clip, "it must be above 0, or 0 for none");
  if (options.keep_last < 0) refuse("the number of checkpoints to keep", options.keep_last, "it must be at least 0");
  if (options.checkpoint_every < 0)
    refuse("the number of steps between checkpoints", options.checkpoint_every, "it must be at least 0");
  if (options.check_replicas < -1)
    refuse("the number of steps between comparisons of the weights", options.check_replicas, "it must be at least -1");
  if (options.checkpoint_every > 0 && options.keep_last == 0)
    throw Error("`checkpoint_every` writes checkpoints, and `keep_last` 0 keeps none; leave one of the two out");
  if (options.data == DataSource::synthetic && !options.data_dir.empty())
    throw Error("`data_dir` goes with `data` fashion-mnist; synthetic data need no files");
  if (options.devices.empty()) options.devices = default_devices();
  check_devices(options.devices);
  if (options.precision == Precision::tf32 && !options.devices[0].is_cuda()) {
    throw Error("`precision` tf32 is how NVIDIA GPUs multiply, and this run is on " + to_string(options.devices) +
                "; take float32 or bf16");
  }
  check_graph_of(options);
  check_split_of(options);
  check_sync_batchnorm(options);
  check_zero(options);
  check_communication(options);
  check_balance(options);
  check_on_nan(options);
  return options;
}

bool by_data_alone(const ModelSplit& split) {
  return split.stages() == 1 && split.mesh.tensor == 1 && split.microbatches == 1;
}

ModelSplit split_of(const TrainOptions& options, int ranks) {
  return options.split.value_or(ModelSplit{.mesh = {.data = ranks}});
}

ModelOptions model_options(const TrainOptions& options) {
  return {.name = options.model,
          .width = options.width,
          .image_size = options.image_size,
          .groups = options.groups,
          .dropout = options.dropout,
          .seed = options.seed};
}

int64_t global_batch(const TrainOptions& options) {
  return options.batch_size * options.scale_batch;
}

bool balances(const TrainOptions& options) {
  return std::holds_alternative<PartsBySpeed>(options.balance);
}

std::vector<double> shares_of(const TrainOptions& options) {
  const auto* const shares = std::get_if<std::vector<double>>(&options.balance);
  return shares == nullptr ? std::vector<double>() : *shares;
}

LearningRate learning_rate_of(const TrainOptions& options) {
  return {.lr = options.lr,
          .batch = global_batch(options),
          .reference_batch = options.reference_batch == 0 ? options.batch_size : options.reference_batch,
          .scaling = options.scale_lr,
          .warmup_epochs = options.warmup,
          .schedule = options.schedule,
          .step_epochs = options.step_epochs,
          .step_factor = options.step_factor,
          .epochs = options.epochs};
}

OptimizerSettings optimizer_settings(const TrainOptions& options) {
  return {.lr = options.lr, .momentum = options.momentum, .weight_decay = options.weight_decay};
}

bool is_plain_sgd(const TrainOptions& options) {
  return options.optimizer == OptimizerKind::sgd && options.momentum == 0 && options.weight_decay == 0;
}

ImageData load_data(const TrainOptions& options) {
  return options.data == DataSource::synthetic ? synthetic_images() : load_fashion_mnist(options.data_dir);
}

void check_batch_size(const TrainOptions& options, const ImageData& data) {
  const int64_t size = global_batch(options);
  if (size <= data.train.size()) return;
  throw Error("the batch size is " + std::to_string(size) + "; it must be at most " +
              std::to_string(data.train.size()) + ", the number of training samples in " + data.source);
}

bool computes_in_bf16(const TrainOptions& options) {
  return options.precision == Precision::bf16;
}

at::MemoryFormat memory_format(const TrainOptions& options) {
  return options.memory_format == MemoryFormat::channels_last ? at::MemoryFormat::ChannelsLast
                                                              : at::MemoryFormat::Contiguous;
}

TrainOptions read_config(const std::filesystem::path& run_dir, const Devices& devices) {
  const auto file = run_dir / kConfigFile;
  std::error_code unknown;
  if (!std::filesystem::exists(file, unknown) && !unknown) {
    throw Error(run_dir.string() + " is not the folder of a run: there is no " + kConfigFile +
                " in it. `lockstep train` makes one");
  }
  return read_json(file, [&](const std::string& text) { return train_options_from_json(text, devices); });
}

}  // namespace lockstep
