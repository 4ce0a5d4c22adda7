#include "train_flags.hpp"

#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "add_option.hpp"
#include "base/number_text.hpp"
#include "flag_checks.hpp"
#include "io/reason.hpp"
#include "output.hpp"
#include "run_name.hpp"
#include "terminal.hpp"
#include "text.hpp"
#include "train_plan.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "trainer/resume.hpp"
#include "trainer/train_options.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace fs = std::filesystem;

namespace {

// `what` names the file in errors.
TrainOptions parse_options(const std::string& text, const Devices& devices, const std::string& what) {
  try {
    const TrainOptions options = train_options_from_json(text, devices);
    TrainOptions what_stays = options;  // flags may still take back the others
    what_stays.cuda_graph = false;
    what_stays.sync_batchnorm = false;
    what_stays.zero_stage = 0;
    what_stays.balance = EqualParts();
    what_stays.split.reset();
    checked(what_stays);
    return options;
  } catch (const Error& error) {
    throw Error(what + ": " + error.what());
  }
}

TrainOptions read_options(const fs::path& file, const Devices& devices) {
  std::ostringstream text;
  errno = 0;
  std::ifstream stream(file);
  // A folder opens, but cannot be read.
  if (!stream || !(text << stream.rdbuf())) {
    throw Error("--config " + file.string() + ": cannot be read: " +
                (errno ? io::reason(errno) : std::string("it is empty")) + "; it takes a run's config.json");
  }
  return parse_options(text.str(), devices, "--config " + file.string());
}

// Empty for "auto" if there is nothing to go on from, so that the run begins.
std::string what_to_resume(const TrainFlags& flags) {
  if (flags.resume != "auto") return flags.resume;
  if (!flags.name) throw UsageError("--resume auto needs --name: that run goes on, or else begins");
  const fs::path run = fs::path(flags.runs_dir) / *flags.name;
  return newest_checkpoint(run / kCheckpointFolder).empty() ? "" : run.string();
}

void warn(const std::string& text) {
  if (this_process().index == 0) Output(STDERR_FILENO).print("lockstep: warning: " + text + "\n");
}

// "last" in --runs-dir, or in there the run called --name.
fs::path resumed_checkpoint(const TrainFlags& flags, const std::string& resume) {
  if (resume != "last") return checkpoint_of(resume, warn);
  return checkpoint_of(flags.name ? fs::path(flags.runs_dir) / *flags.name : last_run(flags.runs_dir), warn);
}

// The options of the run that the checkpoint is of.
TrainOptions resumed_options(const fs::path& checkpoint, const Devices& devices) {
  TrainOptions options = parse_options(read_checkpoint(checkpoint).config, devices, "--resume " + checkpoint.string());
  options.resume = checkpoint;
  options.run_dir = run_of(checkpoint);
  return options;
}

void check_name(const std::string& name) {
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
    throw UsageError("--name \"" + name + "\": it must be the name of a folder, without \"/\"; --runs-dir says where");
  }
  if (std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < ' ' || c == 127; })) {
    throw UsageError(
        "--name: it must have no line breaks or other control characters, which would garble what shows it");
  }
}

// The configuration's split may not go with the flags beside it.
void check_settings(const TrainFlags& flags, const TrainOptions& options) {
  TrainOptions whole = options;
  whole.split.reset();
  const bool plan_follows = !flags.plan.empty() && is_file(flags.plan);
  if (options.split || plan_follows) whole.balance = EqualParts();  // over the split's or the plan's data axis
  checked(whole);
  if (!options.split) return;
  try {
    checked(options);
  } catch (const Error& error) {
    throw Error((flags.config.empty() ? "--resume " + flags.resume : "--config " + flags.config) +
                " splits the network, and that does not fit here: " + error.what() +
                ". --plan none splits it by data alone, --plan auto anew");
  }
}

}  // namespace

void add_flags(CLI::App& app, TrainFlags& flags) {
  const TrainOptions defaults;
  const auto add = [&](const char* name, auto& value, const char* type, const std::string& description,
                       const std::string& group, const std::string& default_text = {}) {
    return add_option(app, name, value, type, description, group, default_text);
  };
  const char* const what = "What to train";
  add("--model", flags.model, "NAME",
      "the network\n"
      "lenet: the section's\n"
      "mlp: six hidden layers of 512 units\n"
      "alexnet: images resized to 224 x 224; the book trains it with --lr 0.01\n"
      "resnet18: ResNet-18 for small images; the book trains it with --lr 0.1. BatchNorm normalises over "
      "each device's own samples (but see --sync-batchnorm); its running statistics are averaged after every epoch\n",
      what, defaults.model)
      ->check(known_model);
  add("--width", flags.width, "X", "mlp, alexnet, resnet18: this many times the channels and units, in multiples of 8",
      what, number_text(defaults.width))
      ->check(rate);
  add("--image-size", flags.image_size, "N",
      "alexnet, resnet18: images are resized to N x N (default: 224 for alexnet; resnet18 takes them as they are)",
      what)
      ->check(number_between<int64_t, 1>);
  add("--groups", flags.groups, "N", "alexnet: 2 is the network of 2012, in two towers of channels", what,
      std::to_string(defaults.groups))
      ->check(number_between<int64_t, 1>);
  add("--dropout", flags.dropout, "P",
      "alexnet: this share of the values of its two wide layers is dropped in training, the same ones on any number of "
      "devices",
      what, number_text(defaults.dropout))
      ->check(rate);
  add("--data", flags.data, "NAME", "fashion-mnist, or synthetic: a stand-in of the same size that needs no files",
      what, std::string(to_string(defaults.data)));
  add("--data-dir", flags.data_dir, "DIR",
      "folder of the four IDX files of Fashion-MNIST, gzipped or plain (default: where Debian's package "
      "dataset-fashion-mnist or lockstep fetch-data put them)",
      what)
      ->check(not_empty);
  add("--config", flags.config, "FILE", "a run's config.json: the same run again; flags beside it override it", what)
      ->check(not_empty);

  add("--resume", flags.resume, "PATH",
      "go on with a stopped run as if it had never been stopped: its folder, or one of the checkpoints in there; last: "
      "the run in --runs-dir that was trained last, or --name's; auto: --name's if it has a checkpoint, and else a new "
      "run. Its own settings hold; --epochs, --devices, --plan, "
      "--threads-per-rank, --balance, --zero-stage, --memory-format, --cuda-graph, --on-nan, --check-replicas and "
      "--data-dir may be others, and what is kept. It stays in its folder, if --name gives no other",
      what)
      ->check(not_empty);

  const char* const where = "Where";
  add("--devices", flags.devices, "LIST",
      "one rank per device (default: every GPU, or else one CPU rank per core)\n"
      "2: the first two GPUs, or two CPU ranks\n"
      "cpu: one CPU rank; cpu,cpu or 2xcpu: two\n"
      "cuda: every GPU; cuda:0,cuda:2: these two\n"
      "2xcuda:0: two ranks that share one GPU\n",
      where);
  add("--plan", flags.plan, "FILE",
      "how the network is split over the devices: a plan of lockstep plan for this network; its devices and batch size "
      "hold where no flag says others\n"
      "auto: measures the network and the devices first, and takes the best split\n"
      "none: by data alone, whatever --config says",
      where, "none")
      ->check(not_empty);
  add("--threads-per-rank", flags.threads_per_rank, "N", "threads that each rank computes with", where,
      std::to_string(defaults.threads_per_rank))
      ->check(number_between<int, 1, 1024>);

  add("--timeout", flags.timeout, "SECONDS",
      "how long a rank waits for another in a call before the run ends with an error that names both; not kept", where,
      std::to_string(defaults.timeout.count()))
      ->check(number_between<int, 1, 1'000'000>);

  add_flags(app, flags.update);
  add_flags(app, flags.communication);

  const char* const how = "How";
  add("--epochs", flags.epochs, "N", "passes over the training set", how, std::to_string(defaults.epochs))
      ->check(number_between<int, 1>);
  add("--seed", flags.seed, "N", "of the initial weights, the samples' order and dropout", how,
      std::to_string(defaults.seed))
      ->check(whole_number<uint64_t>);
  add("--on-nan", flags.on_nan, "WHAT",
      "when a step's loss or gradients are not finite\n"
      "stop: the run ends there with exit code 3; what is kept is of before\n"
      "skip: that step changes nothing, and a warning names it; an epoch of such "
      "steps alone ends the run\n"
      "go-on: nothing looks\n",
      how, std::string(to_string(defaults.on_nan)));
  add("--check-replicas", flags.check_replicas, "N",
      "compare the devices' weights every N steps, and end the run, with the device named, if they differ; 0: never",
      how, "at the end of each epoch")
      ->check(number_between<int64_t, 0>);
  add("--precision", flags.precision, "NAME",
      "float32\n"
      "tf32: float32 whose products round their factors to TF32, on the tensor cores of NVIDIA GPUs\n"
      "bf16: automatic mixed precision, in which convolutions and matrix products compute in bfloat16, and weights, "
      "loss and update stay float32\n",
      how, std::string(to_string(defaults.precision)));
  add("--memory-format", flags.memory_format, "NAME",
      "contiguous, or channels-last: images and convolutions' weights pixel by pixel, which many convolutions are "
      "faster on (lenet on the CPU has kernels of its own, which it does not change); rounding differs",
      how, std::string(to_string(defaults.memory_format)));
  app.add_flag_function(
         "--sync-batchnorm", [&flags](int64_t count) { flags.sync_batchnorm = count > 0; },
         "resnet18: BatchNorm normalises over the samples of all devices, as one device would, and not over each "
         "device's own (--sync-batchnorm=false: not, though --config says so)")
      ->group(how);
  add("--zero-stage", flags.zero_stage, "N",
      "ZeRO, with sgd, adam and adamw: 1: each rank keeps and computes its slice of the optimizer; 2: and of the "
      "gradients; 0: every rank has all of them. The results are the same",
      how, std::to_string(defaults.zero_stage))
      ->check(number_between<int, 0, 2>);
  app.add_flag_function(
         "--cuda-graph", [&flags](int64_t count) { flags.cuda_graph = count > 0; },
         "on GPUs: record the step of a full batch once as a CUDA graph and replay it, so that the CPU does not limit "
         "small networks (--cuda-graph=false: not, though --config says so)")
      ->group(how);

  const char* const out = "What is kept and shown";
  add("--runs-dir", flags.runs_dir, "DIR", "folder of all runs", out, flags.runs_dir)->check(not_empty);
  add("--name", flags.name, "NAME",
      "folder of this run in there, which must not hold another run (default: date, time, model and devices)", out);
  add("--keep-last", flags.keep_last, "N",
      "keep this many of the newest checkpoints for --resume, beside the one with the best test accuracy; 0: write "
      "none",
      out, std::to_string(defaults.keep_last))
      ->check(number_between<int, 0>);
  add("--checkpoint-every", flags.checkpoint_every, "N",
      "a checkpoint every N steps too (default: at the end of each epoch)", out)
      ->check(number_between<int64_t, 1>);
  app.add_flag_function(
         "--tensorboard", [&flags](int64_t count) { flags.tensorboard = count > 0; },
         "an event file in the run's folder, with loss, accuracy, learning rate, images per second and each rank's "
         "wait for data, per epoch: tensorboard --logdir runs (--tensorboard=false: not, though --config says so)")
      ->group(out);
  add("--trace", flags.trace, "FILE",
      "a timeline of steps 3 to 22, for ui.perfetto.dev or chrome://tracing: forward, backward, each bucket of "
      "gradients and the update, on every rank (under a launcher each process writes its own ranks': trace.json, "
      "trace.1.json)",
      out);
  add("--progress", flags.progress, "MODE",
      "auto: bar on a terminal, lines elsewhere\n"
      "bar: a progress bar, if the output is a terminal, and a line per finished epoch\n"
      "lines: a line per finished epoch\n"
      "none: the settings and the result only\n",
      out, flags.progress);
}

TrainOptions to_options(const TrainFlags& flags) {
  Devices devices = flags.devices ? from_flags([&] { return parse_devices(*flags.devices); }) : Devices();
  std::optional<Plan> plan;
  if (!flags.plan.empty() && is_file(flags.plan)) {
    plan = read_train_plan(flags.plan);
    if (!flags.devices) devices = devices_of(*plan, flags.plan);
  }
  if (!flags.resume.empty() && !flags.config.empty()) {
    throw UsageError("--resume goes on with a run's own settings, so that --config cannot go with it");
  }
  TrainOptions options;
  if (!flags.config.empty()) options = read_options(flags.config, devices);
  if (flags.name) check_name(*flags.name);
  const std::string resume = what_to_resume(flags);
  if (!resume.empty()) options = resumed_options(resumed_checkpoint(flags, resume), devices);
  const fs::path resumed_run = resume.empty() ? fs::path() : options.run_dir;
  override_with(flags.model, options.model);
  override_with(flags.width, options.width);
  override_with(flags.image_size, options.image_size);
  override_with(flags.groups, options.groups);
  override_with(flags.dropout, options.dropout);
  from_flags([&] {
    if (flags.data) options.data = data_source_from(*flags.data);
    if (flags.on_nan) options.on_nan = on_nan_from(*flags.on_nan);
    if (flags.precision) options.precision = precision_from(*flags.precision);
    if (flags.memory_format) options.memory_format = memory_format_from(*flags.memory_format);
    return 0;
  });
  override_with(flags.threads_per_rank, options.threads_per_rank);
  if (plan) options.batch_size = plan->batch_size;
  from_flags([&] {
    apply(flags.update, options);
    apply(flags.communication, options);
    return 0;
  });
  override_with(flags.epochs, options.epochs);
  override_with(flags.seed, options.seed);
  override_with(flags.check_replicas, options.check_replicas);
  override_with(flags.sync_batchnorm, options.sync_batchnorm);
  override_with(flags.zero_stage, options.zero_stage);
  override_with(flags.cuda_graph, options.cuda_graph);
  override_with(flags.tensorboard, options.tensorboard);
  override_with(flags.keep_last, options.keep_last);
  override_with(flags.checkpoint_every, options.checkpoint_every);
  if (flags.data_dir) options.data_dir = *flags.data_dir;
  if (!devices.empty()) options.devices = devices;
  if (!flags.plan.empty()) options.split.reset();
  if (options.devices.empty()) options.devices = default_devices();

  if (options.data == DataSource::synthetic && !flags.data_dir) options.data_dir.clear();  // the configuration's
  from_flags([&] {
    check_settings(flags, options);
    return 0;
  });
  if (plan) {
    follow(*plan, flags.plan, options);
    checked(options);
  }
  // So that the run's config.json means the same in every folder.
  if (!options.data_dir.empty()) options.data_dir = fs::absolute(options.data_dir);

  options.trace = flags.trace;
  if (flags.timeout) options.timeout = std::chrono::seconds(*flags.timeout);

  options.run_dir = flags.name             ? fs::path(flags.runs_dir) / *flags.name
                    : !resumed_run.empty() ? resumed_run
                                           : new_run_dir(flags, options);
  return options;
}

fs::path new_run_dir(const TrainFlags& flags, const TrainOptions& options) {
  const std::string what = options.model + (options.data == DataSource::synthetic ? "_synthetic" : "");
  return flags.runs_dir / fs::path(new_run_name(flags.runs_dir, std::time(nullptr), what, options.devices));
}

ProgressMode progress_mode(const std::string& word, int fd) {
  if (word == "auto") return can_redraw(fd) ? ProgressMode::bar : ProgressMode::lines;
  if (word == "bar") return is_terminal(fd) ? ProgressMode::bar : ProgressMode::lines;
  if (word == "lines") return ProgressMode::lines;
  if (word == "none") return ProgressMode::none;
  throw UsageError("--progress \"" + word + "\": it must be auto, bar, lines or none");
}

}  // namespace lockstep::cli
