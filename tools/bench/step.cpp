#include "benches.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/device_info.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/seconds_since.hpp"
#include "cli/add_option.hpp"
#include "cli/common_flags.hpp"
#include "cli/flag_checks.hpp"
#include "cli/text.hpp"
#include "cli/usage.hpp"
#include "ranks/rank_wait.hpp"
#include "report.hpp"

namespace lockstep::cli {

namespace {

const char* const bench_step_explanation =
    "A model with 8 small parameters, so that nearly nothing is computed: every rank\n"
    "takes the same step without DataParallel and with it, in turns, and the best of\n"
    "several rounds counts. The difference is what DataParallel adds to any step.\n"
    "\n"
    "Examples:\n"
    "  lockstep-bench step --devices 2\n"
    "  lockstep-bench step --devices 4xcpu --json step.json\n";

using Clock = std::chrono::steady_clock;

struct BenchStepFlags {
  std::optional<std::string> devices;
  std::string json;
  int rounds = 20, steps = 500;
};

struct Small : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers = {
      register_module("a", torch::nn::Linear(4, 4)), register_module("b", torch::nn::Linear(4, 4)),
      register_module("c", torch::nn::Linear(4, 4)), register_module("d", torch::nn::Linear(4, 4))};
};

// Gives rank 0's seconds per step, the best of the rounds.
BestTimes measure(const Devices& devices, const BenchStepFlags& flags) {
  BestTimes best;
  run(devices, [&](Rank& rank) {
    const auto alone = std::make_shared<Small>();
    alone->to(rank.device());
    torch::optim::SGD alone_sgd(alone->parameters(), /*lr=*/0.01);
    DataParallel net(std::make_shared<Small>(), rank);
    torch::optim::SGD net_sgd(net->parameters(), /*lr=*/0.01);
    const Batch batch{torch::ones({1, 4}, rank.device()),
                      torch::zeros({1}, torch::TensorOptions(torch::kLong).device(rank.device())), rank.world_size()};
    const auto criterion = [](const torch::Tensor& logits, const torch::Tensor& y) {
      return torch::nn::functional::cross_entropy(logits, y);
    };
    const auto time = [&](const char* name, auto step) {
      rank.barrier();
      const auto start = Clock::now();
      for (int i = 0; i < flags.steps; ++i) step();
      synchronize_users(rank);
      const double seconds = seconds_since(start) / flags.steps;
      if (rank.index() == 0) best.add(name, seconds);
    };
    for (int round = 0; round < flags.rounds; ++round) {
      time("alone", [&] {
        alone_sgd.zero_grad();
        criterion(alone->forward(batch.x), batch.y).backward();
        alone_sgd.step();
      });
      time("data parallel", [&] {
        net_sgd.zero_grad();
        net.loss(batch, criterion).backward();
        net_sgd.step();
      });
    }
  });
  return best;
}

int step_command(const BenchStepFlags& flags, Output& output) {
  const Devices devices = devices_from(flags.devices);
  const BestTimes best = measure(devices, flags);
  const double alone = best.of("alone"), parallel = best.of("data parallel");
  output.print(format("a step of a model with 8 small parameters on %s, best of %d rounds of %d steps\n\n",
                      to_string(devices).c_str(), flags.rounds, flags.steps) +
               table({{"alone", format("%8.1f us", alone * 1e6)},
                      {"data parallel", format("%8.1f us", parallel * 1e6)},
                      {"added", format("%8.1f us", (parallel - alone) * 1e6)}}));
  write_json(flags.json, "step", devices,
             {{"rounds", flags.rounds},
              {"steps", flags.steps},
              {"alone_seconds", alone},
              {"data_parallel_seconds", parallel}});
  return 0;
}

}  // namespace

Command add_bench_step(CLI::App& bench) {
  CLI::App* const app = bench.add_subcommand("step", "Measure what DataParallel adds to a step.");
  app->footer(bench_step_explanation);
  const auto flags = std::make_shared<BenchStepFlags>();
  add_devices_flag(*app, flags->devices);
  add_rounds_flag(*app, flags->rounds);
  OptionAdder{*app}("--steps", flags->steps, "N", "how many steps one measurement takes", std::to_string(flags->steps))
      ->check(number_between<int, 1>);
  add_json_flag(*app, flags->json);
  return {app, [flags](Output& output) { return step_command(*flags, output); }};
}

}  // namespace lockstep::cli
