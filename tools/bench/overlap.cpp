#include "benches.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/models/models.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/seconds_since.hpp"
#include "cli/add_option.hpp"
#include "cli/common_flags.hpp"
#include "cli/flag_checks.hpp"
#include "cli/text.hpp"
#include "cli/usage.hpp"
#include "data/parts.hpp"
#include "ranks/observed_backend.hpp"
#include "ranks/rank_wait.hpp"
#include "report.hpp"

namespace lockstep::cli {

namespace {

const char* const bench_overlap_explanation =
    "Three runs of each model take turns, so that a change of the machine's load\n"
    "meets all of them alike: each rank alone (nothing is reduced), reduction after\n"
    "backward, and reduction in buckets while backward runs. Times are medians over\n"
    "the steps: the whole step of the slowest rank, and the communication of the rank\n"
    "that was last to end its backward, since the others also wait for that rank.\n"
    "\n"
    "  within      time of the rank's thread for communication during backward. On\n"
    "              CPU ranks of one process it does additions itself: not free\n"
    "  after       the same after backward\n"
    "  reduced     share of the bytes that were reduced before backward ended\n"
    "  hidden      1 - after (overlapped) / after (afterwards): the share of the time\n"
    "              for communication that no longer follows backward\n"
    "  saved       the step's time that overlap saves, of the time for communication\n"
    "\n"
    "A GPU's host does not wait for communication. There its time is what it adds to\n"
    "the step alone, and only steps and what overlap saves are shown.\n"
    "\n"
    "Examples:\n"
    "  lockstep-bench overlap --devices 2\n"
    "  lockstep-bench overlap --model mlp --bucket-bytes 1000000 --json mlp.json\n";

using Clock = std::chrono::steady_clock;

struct BenchOverlapFlags {
  std::optional<std::string> devices;
  std::string model = "all", json;
  int threads_per_rank = 1, steps = 30;
  int64_t batch_size = 0;
  DataParallelOptions buckets;
};

enum Variant { alone, afterwards, overlapped };
constexpr std::array<const char*, 3> names = {"alone", "afterwards", "overlapped"};

// A step of one rank, or (see slowest_of) of all ranks.
struct Sample {
  double seconds = 0, within = 0, after = 0, reduced = 0;
};

struct Result {
  std::string model;
  int64_t parameters = 0, batch_size = 0;
  bool on_gpus = false;
  std::array<std::vector<Sample>, 3> samples;  // samples by variant
};

// Gives the slowest rank's step, with the communication of the rank that waited least.
Sample slowest_of(const Sample& a, const Sample& b) {
  Sample sample = a.after < b.after ? a : b;
  sample.seconds = std::max(a.seconds, b.seconds);
  return sample;
}

double median(const std::vector<Sample>& samples, double Sample::*value) {
  std::vector<double> values;
  for (const auto& sample : samples) values.push_back(sample.*value);
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// The seconds that a step spends on communication.
double communication(const Result& result) {
  const auto& after_backward = result.samples[afterwards];
  if (!result.on_gpus) return median(after_backward, &Sample::after);
  return median(after_backward, &Sample::seconds) - median(result.samples[alone], &Sample::seconds);
}

double hidden(const Result& result) {
  return 1 - median(result.samples[overlapped], &Sample::after) / median(result.samples[afterwards], &Sample::after);
}

// Compares pairs of steps that followed one another, so that the machine's load matters less.
double saved(const Result& result) {
  std::vector<Sample> differences = result.samples[afterwards];
  for (size_t i = 0; i < differences.size(); ++i) differences[i].seconds -= result.samples[overlapped][i].seconds;
  return median(differences, &Sample::seconds) / communication(result);
}

// Counts what one rank's threads spend on the allreduces of a step. While backward computes, a Reducer posts and polls.
// It posts the last bytes with backward's last gradient. So the time that follows this post is spent after backward.
class CommunicationTimes : public CallObserver {
 public:
  void begin_step(int64_t bytes_of_step) {
    *this = {};
    bytes_of_step_ = bytes_of_step;
  }

  void posts(c10d::OpType, int64_t posted, int) override {
    bytes += posted;
    ended_ = ended_ || bytes >= bytes_of_step_;
  }
  void spent(double seconds) override { (ended_ ? after : within) += seconds; }
  void waits() override { ended_ = true; }
  void found_complete(int64_t reduced) override {
    if (!ended_) bytes_early += reduced;
  }

  double within = 0;        // seconds of posts and polls during backward
  double after = 0;         // seconds of later posts and polls, and of waits
  int64_t bytes = 0;        // the bytes that were posted
  int64_t bytes_early = 0;  // posted bytes that polls found complete during backward

 private:
  int64_t bytes_of_step_ = 0;  // the bytes that are posted in a step
  bool ended_ = false;         // whether backward has ended
};

// A model to measure, and the size of one of its samples.
struct Subject {
  std::string name;
  std::function<std::shared_ptr<torch::nn::SequentialImpl>()> make;
  std::vector<int64_t> sample;
};

// It has 25.2 million parameters, and little to compute for each.
Subject mlp() {
  constexpr int64_t units = 2048;
  const MlpOptions options{.inputs = units, .hidden = std::vector<int64_t>(6, units)};
  return {"mlp", [options] { return Mlp(options).ptr(); }, {units}};
}

// It has 11.2 million parameters, and much to compute for each.
Subject resnet18() {
  const ResNet18Options options{.in_channels = 3};
  return {"resnet18", [options] { return ResNet18(options).ptr(); }, {3, 32, 32}};
}

// Makes the network in the memory format that `lockstep train` gives a model of this name.
std::shared_ptr<torch::nn::SequentialImpl> made(const Subject& subject, const c10::Device& device) {
  auto module = subject.make();
  module->to(device);
  set_memory_format(*module, fast_memory_format({.name = subject.name}, device));
  return module;
}

// One replica that trains in one of the three ways.
class Runner {
 public:
  Runner(const Subject& subject, Variant variant, Rank& rank, const DataParallelOptions& options)
      : variant_(variant),
        rank_(observed(rank, {times_})),
        module_(made(subject, rank_.device())),
        sgd_(module_->parameters(), /*lr=*/1e-3) {
    if (variant != alone) net_.emplace(module_, rank_, with_overlap(options, variant == overlapped));
  }

  Sample step(const Batch& batch) {
    times_->begin_step(parameters() * static_cast<int64_t>(sizeof(float)));
    synchronize_users(rank_);
    const auto start = Clock::now();
    sgd_.zero_grad();
    if (variant_ == alone) {
      torch::nn::functional::cross_entropy(module_->forward(batch.x), batch.y).backward();
    } else {
      net_->loss(batch, torch::nn::functional::cross_entropy).backward();
    }
    sgd_.step();
    synchronize_users(rank_);
    const bool during = variant_ == overlapped;  // otherwise even the posts come after backward
    return {
        .seconds = seconds_since(start),
        .within = during ? times_->within : 0,
        .after = times_->after + (during ? 0 : times_->within),
        .reduced = static_cast<double>(times_->bytes_early) / static_cast<double>(std::max<int64_t>(1, times_->bytes))};
  }

  int64_t parameters() const {
    int64_t sum = 0;
    for (const auto& parameter : module_->parameters()) sum += parameter.numel();
    return sum;
  }

 private:
  static DataParallelOptions with_overlap(DataParallelOptions options, bool overlap) {
    options.overlap = overlap;
    return options;
  }

  const Variant variant_;
  const std::shared_ptr<CommunicationTimes> times_ = std::make_shared<CommunicationTimes>();
  Rank rank_;
  std::shared_ptr<torch::nn::SequentialImpl> module_;
  torch::optim::SGD sgd_;
  std::optional<DataParallel<torch::nn::SequentialImpl>> net_;  // null for the variant `alone`
};

Result measure(const Subject& subject, const Devices& devices, const BenchOverlapFlags& flags, int64_t batch_size) {
  Result result;
  result.model = subject.name;
  result.batch_size = batch_size;
  result.on_gpus = !devices[0].is_cpu();
  std::mutex mutex;
  run(devices,
      [&](Rank& rank) {
        const Range part = part_of(batch_size, rank.index(), rank.world_size());
        auto shape = subject.sample;
        shape.insert(shape.begin(), part.size());
        const Batch batch{torch::randn(shape).to(rank.device()), torch::randint(10, {part.size()}).to(rank.device()),
                          batch_size};
        std::vector<std::unique_ptr<Runner>> runners;
        for (const Variant variant : {alone, afterwards, overlapped}) {
          runners.push_back(std::make_unique<Runner>(subject, variant, rank, flags.buckets));
        }
        std::array<std::vector<Sample>, 3> samples;
        for (int step = -3; step < flags.steps; ++step) {  // three to warm up: the first learns the buckets' order
          for (size_t variant = 0; variant < runners.size(); ++variant) {
            rank.barrier();
            const Sample sample = runners[variant]->step(batch);
            if (step >= 0) samples[variant].push_back(sample);
          }
        }
        const std::lock_guard lock(mutex);
        result.parameters = runners[0]->parameters();
        for (size_t variant = 0; variant < samples.size(); ++variant) {
          auto& all = result.samples[variant];
          if (all.empty()) {
            all = samples[variant];
          } else {
            std::transform(all.begin(), all.end(), samples[variant].begin(), all.begin(), slowest_of);
          }
        }
      },
      {.threads_per_rank = flags.threads_per_rank});
  return result;
}

std::string report_of_steps(const Result& result) {
  std::string text = "              step ms\n";
  for (size_t variant = 0; variant < names.size(); ++variant) {
    text += format("  %-10s  %7.1f\n", names[variant], 1e3 * median(result.samples[variant], &Sample::seconds));
  }
  const double seconds = communication(result);
  if (!(seconds > 0)) return text + "  communication takes no time that shows\n\n";
  return text + format("  communication: %.1f ms; saved: %.0f%% of its time\n\n", 1e3 * seconds, 1e2 * saved(result));
}

std::string report(const Result& result) {
  std::string text = format("%s, %.1f million parameters, global batch %lld\n", result.model.c_str(),
                            static_cast<double>(result.parameters) / 1e6, static_cast<long long>(result.batch_size));
  if (result.on_gpus) return text + report_of_steps(result);
  text += "              step ms  within ms  after ms  reduced\n";
  for (size_t variant = 0; variant < names.size(); ++variant) {
    const auto& samples = result.samples[variant];
    text += format("  %-10s  %7.1f  %9.1f  %8.1f  %6.0f%%\n", names[variant], 1e3 * median(samples, &Sample::seconds),
                   1e3 * median(samples, &Sample::within), 1e3 * median(samples, &Sample::after),
                   1e2 * median(samples, &Sample::reduced));
  }
  return text + format("  hidden behind backward: %.0f%% of the time for communication; saved: %.0f%%\n\n",
                       1e2 * hidden(result), 1e2 * saved(result));
}

nlohmann::ordered_json to_json(const BenchOverlapFlags& flags, const std::vector<Result>& results) {
  nlohmann::ordered_json json;
  json["threads_per_rank"] = flags.threads_per_rank;
  json["steps"] = flags.steps;
  json["bucket_bytes"] = flags.buckets.bucket_bytes;
  json["first_bucket_bytes"] = flags.buckets.first_bucket_bytes;
  for (const auto& result : results) {
    nlohmann::ordered_json entry;
    entry["model"] = result.model;
    entry["parameters"] = result.parameters;
    entry["batch_size"] = result.batch_size;
    for (size_t variant = 0; variant < names.size(); ++variant) {
      const auto& samples = result.samples[variant];
      auto& of_variant = entry[names[variant]] = {{"step_seconds", median(samples, &Sample::seconds)}};
      if (result.on_gpus) continue;
      of_variant["within_seconds"] = median(samples, &Sample::within);
      of_variant["after_seconds"] = median(samples, &Sample::after);
      of_variant["reduced_share"] = median(samples, &Sample::reduced);
    }
    if (!result.on_gpus) entry["hidden_share"] = hidden(result);
    entry["saved_share"] = saved(result);
    json["models"].push_back(std::move(entry));
  }
  return json;
}

int overlap_command(const BenchOverlapFlags& flags, Output& output) {
  if (flags.model != "all" && flags.model != "mlp" && flags.model != "resnet18") {
    throw UsageError("--model \"" + flags.model + "\": it must be mlp, resnet18 or all");
  }
  const Devices devices = devices_from(flags.devices);
  const auto ranks = static_cast<int64_t>(devices.size());
  const auto batch_size = [&](int64_t per_rank) { return flags.batch_size > 0 ? flags.batch_size : per_rank * ranks; };
  output.print("overlap on " + to_string(devices) +
               format(", buckets of %lld bytes, the first of %lld; medians of %d steps\n\n",
                      static_cast<long long>(flags.buckets.bucket_bytes),
                      static_cast<long long>(flags.buckets.first_bucket_bytes), flags.steps));
  std::vector<Result> results;
  const auto add = [&](Result result) {
    output.print(report(result));
    results.push_back(std::move(result));
  };
  if (flags.model != "resnet18") add(measure(mlp(), devices, flags, batch_size(64)));
  if (flags.model != "mlp") add(measure(resnet18(), devices, flags, batch_size(8)));
  write_json(flags.json, "overlap", devices, to_json(flags, results));
  return 0;
}

}  // namespace

Command add_bench_overlap(CLI::App& bench) {
  CLI::App* const app =
      bench.add_subcommand("overlap", "Measure how much of the gradients' reduction hides behind backward.");
  app->footer(bench_overlap_explanation);
  const auto flags = std::make_shared<BenchOverlapFlags>();
  const OptionAdder add{*app};
  add_devices_flag(*app, flags->devices);
  add_threads_flag(*app, flags->threads_per_rank);
  add("--model", flags->model, "NAME", "mlp, resnet18 or all", flags->model);
  add("--batch-size", flags->batch_size, "N",
      "samples per step, over all devices (default: 64 per rank for mlp, 8 for resnet18)", "")
      ->check(number_between<int64_t, 1>);
  add("--steps", flags->steps, "N", "measured steps of each kind", std::to_string(flags->steps))
      ->check(number_between<int, 1>);
  add("--bucket-bytes", flags->buckets.bucket_bytes, "N", "size of a bucket of gradients",
      std::to_string(flags->buckets.bucket_bytes));
  add("--first-bucket-bytes", flags->buckets.first_bucket_bytes, "N", "size of the first bucket",
      std::to_string(flags->buckets.first_bucket_bytes));
  add_json_flag(*app, flags->json);
  return {app, [flags](Output& output) { return overlap_command(*flags, output); }};
}

}  // namespace lockstep::cli
