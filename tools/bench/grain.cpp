#include "benches.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/keep_freed_memory.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/seconds_since.hpp"
#include "cli/add_option.hpp"
#include "cli/common_flags.hpp"
#include "cli/flag_checks.hpp"
#include "cli/measured_model.hpp"
#include "cli/text.hpp"
#include "cli/usage.hpp"
#include "ranks/rank_wait.hpp"
#include "report.hpp"

namespace lockstep::cli {

namespace {

const char* const bench_grain_explanation =
    "Every rank takes steps of one batch of made-up samples, in turns without a grain\n"
    "and with it: forward, backward, averaging and SGD with momentum. The best of\n"
    "several rounds counts. The ratio is what the same bits on any number of devices\n"
    "cost for this model, this batch and these devices.\n"
    "\n"
    "Examples:\n"
    "  lockstep-bench grain --devices 2xcpu\n"
    "  lockstep-bench grain --model mlp --batch-size 2048 --grain 256\n";

struct BenchGrainFlags {
  std::optional<std::string> devices;
  ModelOptions model;
  std::string json;
  int64_t batch_size = 256, grain = 32;
  int rounds = 20, steps = 5;
};

// One rank's network, optimizer and criterion.
struct Training {
  Training(const ModelOptions& model, Rank& rank)
      : net(in_fast_format(model, rank), rank),
        sgd(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)),
        criterion(model_loss(model)) {}

  static torch::nn::Sequential in_fast_format(const ModelOptions& model, Rank& rank) {
    auto net = rank.in_turn([&] { return make_model(model); });
    set_memory_format(*net, fast_memory_format(model, rank.device()));
    return net;
  }

  void step(const Batch& batch) {
    sgd.zero_grad();
    net.loss(batch, criterion).backward();
    sgd.step();
  }

  DataParallel<torch::nn::SequentialImpl> net;
  torch::optim::SGD sgd;
  Criterion criterion;
};

Batch batch_of(const Dataset& images, const BenchGrainFlags& flags, int64_t grain, Rank& rank) {
  return *batches(images, {.size = flags.batch_size, .seed = 1, .epoch = 1, .grain = grain}, rank).begin();
}

// Gives rank 0's seconds per step, the best of the rounds.
BestTimes measure_grain(const Devices& devices, const BenchGrainFlags& flags) {
  keep_freed_memory();
  Dataset images = learns_text(flags.model) ? stand_in_for(flags.model, flags.batch_size)
                                            : synthetic_images(flags.batch_size, 1).train;
  if (!learns_text(flags.model)) images.x = images.x.to(torch::kFloat) / 255;
  BestTimes best;
  run(devices, [&](Rank& rank) {
    const auto on_device = images.to(rank.device());
    const Batch plain_batch = batch_of(on_device, flags, 0, rank);
    const Batch grained_batch = batch_of(on_device, flags, flags.grain, rank);
    Training plain(flags.model, rank), grained(flags.model, rank);
    const auto time = [&](const char* name, Training& training, const Batch& batch) {
      training.step(batch);  // makes its memory warm again
      synchronize_users(rank);
      rank.barrier();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < flags.steps; ++i) training.step(batch);
      synchronize_users(rank);
      if (rank.index() == 0) best.add(name, seconds_since(start) / flags.steps);
    };
    for (int round = 0; round < flags.rounds; ++round) {
      time("without", plain, plain_batch);
      time("with", grained, grained_batch);
    }
  });
  return best;
}

int grain_command(const BenchGrainFlags& flags, Output& output) {
  if (flags.grain > flags.batch_size) {
    throw UsageError("--grain is " + std::to_string(flags.grain) + "; it must be at most --batch-size, " +
                     std::to_string(flags.batch_size));
  }
  const Devices devices = devices_from(flags.devices);
  const BestTimes best = measure_grain(devices, flags);
  const double without = best.of("without"), with = best.of("with");
  output.print(format("a step of %s on %s, batches of %lld in grains of %lld, best of %d rounds of %d steps\n\n",
                      to_string(flags.model).c_str(), to_string(devices).c_str(),
                      static_cast<long long>(flags.batch_size), static_cast<long long>(flags.grain), flags.rounds,
                      flags.steps) +
               table({{"without a grain", format("%8.2f ms", without * 1e3)},
                      {"with it", format("%8.2f ms", with * 1e3)},
                      {"ratio", format("%8.3f", with / without)}}));
  write_json(flags.json, "grain", devices,
             {{"model", to_string(flags.model)},
              {"batch_size", flags.batch_size},
              {"grain", flags.grain},
              {"rounds", flags.rounds},
              {"steps", flags.steps},
              {"seconds_without", without},
              {"seconds_with", with}});
  return 0;
}

}  // namespace

Command add_bench_grain(CLI::App& bench) {
  CLI::App* const app = bench.add_subcommand("grain", "Measure what a grain costs.");
  app->footer(bench_grain_explanation);
  const auto flags = std::make_shared<BenchGrainFlags>();
  const OptionAdder add{*app};
  add_devices_flag(*app, flags->devices);
  add_model_flags(*app, flags->model);
  add("--batch-size", flags->batch_size, "N", "samples per step, over all devices", std::to_string(flags->batch_size))
      ->check(number_between<int64_t, 1>);
  add("--grain", flags->grain, "N", "as for lockstep train", std::to_string(flags->grain))
      ->check(number_between<int64_t, 1>);
  add_rounds_flag(*app, flags->rounds);
  add("--steps", flags->steps, "N", "how many steps one measurement takes", std::to_string(flags->steps))
      ->check(number_between<int, 1>);
  add_json_flag(*app, flags->json);
  return {app, [flags](Output& output) { return grain_command(*flags, output); }};
}

}  // namespace lockstep::cli
