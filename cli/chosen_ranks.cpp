#include "chosen_ranks.hpp"

#include <torch/optim/sgd.h>
#include <lockstep/base/version.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/ranks/rank.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/seconds_since.hpp"
#include "commands.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "devices/cpu_cores.hpp"
#include "io/kept_choice.hpp"
#include "measured_model.hpp"
#include "trainer/option_table.hpp"
#include "trainer/train_options.hpp"

namespace lockstep::cli {
namespace {

constexpr int kSteps = 4;  // of which the first warms up

// Ranks make no result worse but by rounding. Other ways must be this much faster.
constexpr double kClearly = 0.95;

double seconds_per_step(const TrainOptions& options, size_t ranks, int threads) {
  double best = std::numeric_limits<double>::infinity();
  const Dataset data = stand_in_for(options.model, options.batch.size);
  const auto train = [&](Rank& rank) {
    auto module = make_model(options.model);
    fuse_layers(*module);
    DataParallel net(module, rank);
    torch::optim::SGD sgd(net->parameters(), /*lr=*/1e-6);
    for (int step = 0; step < kSteps; ++step) {
      for (const auto& batch : batches(data, {.size = options.batch.size, .epoch = step}, rank)) {
        const auto start = std::chrono::steady_clock::now();
        sgd.zero_grad();
        net.loss(batch, model_loss(options.model)).backward();
        sgd.step();
        if (rank.index() == 0 && step > 0) best = std::min(best, seconds_since(start));
      }
    }
  };
  run(Devices(ranks, c10::Device(c10::kCPU)), train, {.threads_per_rank = threads});
  return best;
}

// Gives the number of ranks.
size_t fastest(const TrainOptions& options, size_t cores) {
  std::vector<size_t> ways = {cores, cores / 2, 1};
  std::erase_if(ways, [&](size_t ranks) {
    return ranks == 0 || cores % ranks != 0 || static_cast<int64_t>(ranks) > options.batch.size;
  });
  ways.erase(std::unique(ways.begin(), ways.end()), ways.end());
  size_t chosen = ways.front();
  double best = seconds_per_step(options, chosen, static_cast<int>(cores / chosen));
  for (size_t i = 1; i < ways.size(); ++i) {
    const double seconds = seconds_per_step(options, ways[i], static_cast<int>(cores / ways[i]));
    if (seconds >= kClearly * best) continue;
    chosen = ways[i];
    best = seconds;
  }
  return chosen;
}

}  // namespace

bool leaves_ranks_open(const TrainFlags& flags, const TrainOptions& options) {
  static const std::set<std::string_view> of_ranks = {"grain",          "balance",          "accumulate",
                                                      "zero_stage",     "check_replicas",   "check_arithmetic",
                                                      "sync_batchnorm", "memory_format"};
  bool open = options.devices[0].is_cpu() && cpu_cores() > 1 && flags.config.empty() && options.keep.resume.empty() &&
              options.precision == Precision::float32 && !comm::read_launch_environment(std::getenv);
  each_option(options, [&](const Option& option, const auto&) {
    const std::string_view group = option.group ? option.group : "";
    const bool is_of_ranks =
        group == option_groups::where || group == option_groups::exchange || of_ranks.contains(option.key);
    if (is_of_ranks && flags.of(option.key)) open = false;
  });
  return open;
}

void choose_ranks(TrainOptions& options) {
  const size_t cores = options.devices.size();
  const std::string key = "ranks|" + cpu_name() + "|" + std::to_string(cores) + "|" + torch_version() + "|" + version() +
                          "|" + to_string(options.model) + "|" + std::to_string(options.batch.size);
  const std::string word = io::kept_choice(key, [&] { return std::to_string(fastest(options, cores)); });
  const size_t ranks = std::clamp<size_t>(std::strtoul(word.c_str(), nullptr, 10), 1, cores);
  options.devices.resize(ranks, options.devices[0]);
  options.threads_per_rank = static_cast<int>(cores / ranks);
}

}  // namespace lockstep::cli
