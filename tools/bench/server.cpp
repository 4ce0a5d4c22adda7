#include "benches.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/server/parameter_server.hpp>
#include <lockstep/trainer/train_options.hpp>
#include <nlohmann/json.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

const char* const bench_server_explanation =
    "LeNet, trained in four ways on the same devices, one after the other: by all\n"
    "ranks with allreduce, and by all but the last ones, which are servers, in the\n"
    "modes of a parameter server. After each epoch: the seconds of training so far,\n"
    "and loss and accuracy on the test set, whose evaluation is not counted.\n"
    "\n"
    "All share out the same batches. synchronous makes one update of each, as\n"
    "allreduce does; asynchronous and bounded one for each worker's part, with the\n"
    "same learning rate, so several times as many.\n"
    "\n"
    "Examples:\n"
    "  lockstep-bench server --devices 3xcpu\n"
    "  lockstep-bench server --devices 4xcpu --servers 2 --json server.json\n";

using Clock = std::chrono::steady_clock;
namespace F = torch::nn::functional;

struct BenchServerFlags {
  std::optional<std::string> devices;
  std::string data = "fashion-mnist", data_dir, json;
  int servers = 1, epochs = 5, threads_per_rank = 1;
  int64_t batch_size = 256, staleness = 2, samples = 0;  // samples 0: all
  uint64_t seed = 1;
  double lr = 0.2;
};

// The state after an epoch.
struct Point {
  double seconds = 0;  // seconds of training so far
  Score test;
};

struct Curve {
  std::string name;
  int workers = 0;
  std::vector<Point> points;
};

ImageData data_of(const BenchServerFlags& flags) {
  if (flags.data == "synthetic" && flags.samples > 0) return synthetic_images(flags.samples, flags.samples);
  ImageData data = images_named(flags.data, flags.data_dir);
  if (flags.samples > 0 && flags.samples < data.train.size()) {
    data.train = {data.train.x.narrow(0, 0, flags.samples), data.train.y.narrow(0, 0, flags.samples)};
  }
  return data;
}

torch::nn::Sequential make_net(const BenchServerFlags& flags) {
  return make_model({.name = "lenet"}, flags.seed);
}

std::unique_ptr<torch::optim::Optimizer> make_sgd(const std::vector<torch::Tensor>& parameters, double lr) {
  return std::make_unique<torch::optim::SGD>(parameters, lr);
}

BatchOptions sampling(const BenchServerFlags& flags, int epoch) {
  return {.size = flags.batch_size, .seed = flags.seed, .epoch = epoch};
}

// Calls train_epoch(number) on every rank. After each epoch evaluates `net`, which is then equal on all ranks.
template <class TrainEpoch>
std::vector<Point> curve_of(Rank& rank, torch::nn::Sequential net, const Dataset& test, int epochs,
                            TrainEpoch&& train_epoch) {
  std::vector<Point> points;
  double seconds = 0;
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    rank.barrier();
    const auto start = Clock::now();
    train_epoch(epoch);
    synchronize_users(rank);
    rank.barrier();
    seconds += seconds_since(start);
    points.push_back({seconds, evaluate([&](const torch::Tensor& x) { return net->forward(x); }, test, rank)});
  }
  return points;
}

Curve with_allreduce(const Devices& devices, const BenchServerFlags& flags, const ImageData& data) {
  Curve curve{"allreduce", static_cast<int>(devices.size()), {}};
  run(devices,
      [&](Rank& rank) {
        auto net = make_net(flags);
        DataParallel replica(net, rank);
        const auto sgd = make_sgd(net->parameters(), flags.lr);
        const Dataset train = data.train.to(rank.device());
        const auto points = curve_of(rank, net, data.test.to(rank.device()), flags.epochs, [&](int epoch) {
          for (auto& batch : batches(train, sampling(flags, epoch), rank)) {
            sgd->zero_grad(/*set_to_none=*/false);
            replica.loss(batch, F::cross_entropy).backward();
            sgd->step();
          }
        });
        if (rank.index() == 0) curve.points = points;
      },
      {.threads_per_rank = flags.threads_per_rank});
  return curve;
}

Curve with_servers(const std::string& name, Consistency consistency, const Devices& devices,
                   const BenchServerFlags& flags, const ImageData& data) {
  Curve curve{name, static_cast<int>(devices.size()) - flags.servers, {}};
  run(devices,
      [&](Rank& rank) {
        auto net = make_net(flags);
        const auto optimizer = [&](const std::vector<torch::Tensor>& slices) { return make_sgd(slices, flags.lr); };
        ParameterServer server(net, rank, optimizer,
                               {.servers = flags.servers, .consistency = consistency, .staleness = flags.staleness});
        const Dataset train = data.train.to(rank.device());
        const auto points = curve_of(rank, net, data.test.to(rank.device()), flags.epochs, [&](int epoch) {
          const auto lost = server.train([&](Worker& worker) {
            for (auto& batch : batches(train, sampling(flags, epoch), worker)) {
              net->zero_grad(/*set_to_none=*/false);
              if (batch.size() > 0) worker.backward(F::cross_entropy(net->forward(batch.x), batch.y), batch);
              worker.step();
            }
          });
          if (!lost.empty())
            throw Error("worker " + std::to_string(lost[0].worker) + " failed: " + lost[0].reason, {Error::user_code});
        });
        if (rank.index() == 0) curve.points = points;
      },
      {.threads_per_rank = flags.threads_per_rank});
  return curve;
}

double images_per_second(const Curve& curve, const ImageData& data) {
  return static_cast<double>(data.train.size()) * static_cast<double>(curve.points.size()) /
         curve.points.back().seconds;
}

std::string report(const Curve& curve, const ImageData& data) {
  std::string text =
      format("%s, %d workers: %.0f images/s\n", curve.name.c_str(), curve.workers, images_per_second(curve, data));
  int epoch = 0;
  for (const auto& point : curve.points) {
    text += format("  epoch %3d  %8.1f s  test loss %.4f  test acc %.4f\n", ++epoch, point.seconds, point.test.loss,
                   point.test.accuracy());
  }
  return text + "\n";
}

nlohmann::ordered_json to_json(const BenchServerFlags& flags, const std::vector<Curve>& curves, const ImageData& data) {
  nlohmann::ordered_json json;
  json["data"] = data.source;
  json["servers"] = flags.servers;
  json["staleness"] = flags.staleness;
  json["batch_size"] = flags.batch_size;
  json["lr"] = flags.lr;
  json["seed"] = flags.seed;
  json["threads_per_rank"] = flags.threads_per_rank;
  for (const auto& curve : curves) {
    nlohmann::ordered_json entry{
        {"name", curve.name}, {"workers", curve.workers}, {"images_per_second", images_per_second(curve, data)}};
    for (const auto& point : curve.points) {
      entry["epochs"].push_back(
          {{"seconds", point.seconds}, {"test_loss", point.test.loss}, {"test_accuracy", point.test.accuracy()}});
    }
    json["ways"].push_back(std::move(entry));
  }
  return json;
}

int server_command(const BenchServerFlags& flags, Output& output) {
  const Devices devices = devices_from(flags.devices);
  if (static_cast<int>(devices.size()) <= flags.servers) {
    throw UsageError("--servers " + std::to_string(flags.servers) + " of " + std::to_string(devices.size()) +
                     " ranks leaves no worker; give --devices more than --servers");
  }
  const ImageData data = data_of(flags);
  output.print(format("lenet on %s, %s, batch size %lld, learning rate %g; %d of the ranks as servers, or none\n\n",
                      data.source.c_str(), to_string(devices).c_str(), static_cast<long long>(flags.batch_size),
                      flags.lr, flags.servers));
  std::vector<Curve> curves;
  const auto add = [&](Curve curve) {
    output.print(report(curve, data));
    curves.push_back(std::move(curve));
  };
  add(with_allreduce(devices, flags, data));
  add(with_servers("synchronous", Consistency::synchronous, devices, flags, data));
  add(with_servers("asynchronous", Consistency::asynchronous, devices, flags, data));
  add(with_servers("bounded by " + std::to_string(flags.staleness), Consistency::bounded, devices, flags, data));
  write_json(flags.json, "server", devices, to_json(flags, curves, data));
  return 0;
}

}  // namespace

Command add_bench_server(CLI::App& bench) {
  CLI::App* const app = bench.add_subcommand(
      "server", "Measure a parameter server beside allreduce: images per second, and loss over time.");
  app->footer(bench_server_explanation);
  const auto flags = std::make_shared<BenchServerFlags>();
  const OptionAdder add{*app};
  add_devices_flag(*app, flags->devices);
  add("--servers", flags->servers, "N", "how many of the ranks are servers", std::to_string(flags->servers))
      ->check(number_between<int, 1>);
  add("--staleness", flags->staleness, "N", "pushes that a bounded worker may be ahead of the slowest",
      std::to_string(flags->staleness))
      ->check(number_between<int64_t, 0>);
  add("--epochs", flags->epochs, "N", "passes over the training set", std::to_string(flags->epochs))
      ->check(number_between<int, 1>);
  add("--batch-size", flags->batch_size, "N", "samples of a batch, over all workers", std::to_string(flags->batch_size))
      ->check(number_between<int64_t, 1>);
  add("--lr", flags->lr, "X", "learning rate of plain SGD", "0.2")->check(rate);
  add("--seed", flags->seed, "N", "the seed of the first weights and of the samples' order",
      std::to_string(flags->seed))
      ->check(number_between<uint64_t, 0>);
  add_threads_flag(*app, flags->threads_per_rank);
  add("--data", flags->data, "NAME", "fashion-mnist or synthetic", flags->data);
  add("--data-dir", flags->data_dir, "DIR", "as for lockstep train", "");
  add("--samples", flags->samples, "N", "train with the first N samples alone (default: all)", "")
      ->check(number_between<int64_t, 1>);
  add_json_flag(*app, flags->json);
  return {app, [flags](Output& output) { return server_command(*flags, output); }};
}

}  // namespace lockstep::cli
