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
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <string_view>

#include "base/seconds_since.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "commands.hpp"
#include "devices/cpu_cores.hpp"
#include "devices/processor_kind.hpp"
#include "io/kept_choice.hpp"
#include "measured_model.hpp"
#include "trainer/train_options.hpp"

namespace lockstep::cli {
namespace {

// Each rank costs a sum of gradients, and each thread many waits. Fewer ranks must be this much faster.
constexpr double kClearly = 0.95;

constexpr double kTooLong = 0.3;  // seconds of a step, above which nothing is measured

// Takes the best of `steps` steps, after one that warms up.
double seconds_per_step(const TrainOptions& options, size_t ranks, int threads, int steps) {
  double best = std::numeric_limits<double>::infinity();
  const Dataset data = stand_in_for(options.model, options.batch.size);
  const auto train = [&](Rank& rank) {
    auto module = make_model(options.model);
    fuse_layers(*module);
    DataParallel net(module, rank);
    torch::optim::SGD sgd(net->parameters(), /*lr=*/1e-6);
    for (int step = 0; step <= steps; ++step) {
      for (const auto& batch : batches(data, {.size = options.batch.size, .epoch = step}, rank)) {
        const auto start = std::chrono::steady_clock::now();
        sgd.zero_grad();
        net.loss(batch, model_loss(options.model)).backward();
        sgd.step();
        if (rank.index() == 0 && (step > 0 || steps == 0)) best = std::min(best, seconds_since(start));
      }
    }
  };
  run(Devices(ranks, c10::Device(c10::kCPU)), train, {.threads_per_rank = threads});
  return best;
}

// Gives the number of ranks, or 0 if that would take long.
size_t fastest(const TrainOptions& options, size_t cores) {
  size_t chosen = cores;
  double best = 0;
  if (seconds_per_step(options, cores, 1, /*steps=*/0) > kTooLong) return 0;
  for (const size_t ranks : std::set<size_t, std::greater<>>{cores, cores / 2, 1}) {
    if (ranks == 0 || cores % ranks != 0) continue;
    const double seconds = seconds_per_step(options, ranks, static_cast<int>(cores / ranks), /*steps=*/4);
    if (best > 0 && seconds >= kClearly * best) continue;
    chosen = ranks;
    best = seconds;
  }
  return chosen;
}

}  // namespace

// BatchNorm normalises over a rank's samples, so for ResNet-18 the number of ranks is more than a matter of speed. A
// step of AlexNet takes seconds.
bool leaves_ranks_open(const TrainFlags& flags, const TrainOptions& options) {
  static const std::set<std::string_view> models = {"lenet", "mlp", "gpt"};
  static const auto of_ranks = {"devices",          "split",      "threads_per_rank", "grain",
                                "balance",          "accumulate", "zero_stage",       "check_replicas",
                                "check_arithmetic", "sync_every", "compress",         "memory_format"};
  return models.contains(options.model.name) && options.devices[0].is_cpu() && cpu_cores() > 1 &&
         options.batch.size >= cpu_cores() && flags.config.empty() && options.keep.resume.empty() &&
         options.precision == Precision::float32 && !comm::read_launch_environment(std::getenv) &&
         std::none_of(of_ranks.begin(), of_ranks.end(), [&](const char* key) { return flags.of(key).has_value(); });
}

bool choose_ranks(TrainOptions& options) {
  const size_t cores = options.devices.size();
  const std::string key = "ranks|" + cpu_name() + "|" + processor_kind(c10::kCPU) + "|" + std::to_string(cores) + "|" +
                          torch_version() + "|" + version() + "|" + to_string(options.model) + "|" +
                          std::to_string(options.batch.size);
  const std::string word = io::kept_choice(key, "0", [&] { return std::to_string(fastest(options, cores)); });
  const size_t ranks = std::min<size_t>(std::strtoul(word.c_str(), nullptr, 10), cores);
  if (ranks == 0) return false;
  options.devices.resize(ranks, options.devices[0]);
  options.threads_per_rank = static_cast<int>(cores / ranks);
  return true;
}

}  // namespace lockstep::cli
