#include "benches.hpp"

#include <torch/types.h>
#include <torch/utils.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/scratch/allreduce.hpp>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "cli/add_option.hpp"
#include "cli/common_flags.hpp"
#include "cli/flag_checks.hpp"
#include "cli/text.hpp"
#include "cli/usage.hpp"
#include "comm/group_member.hpp"
#include "data_parallel/grain_terms.hpp"
#include "devices/check_devices.hpp"
#include "ranks/rank_wait.hpp"
#include "report.hpp"
#include "run_program.hpp"
#include "trainer/report_page.hpp"

namespace lockstep::cli {

namespace {

const char* const bench_allreduce_explanation =
    "Sums float tensors of several sizes over the devices, again and again, and keeps\n"
    "the best of several rounds in which all take turns:\n"
    "\n"
    "  ranks    Rank::allreduce, between ranks that are threads of this process\n"
    "  grains   how a run with --grain averages, between the same ranks: in the\n"
    "           order of a tree; each rank has one grain\n"
    "  naive, sharded, ring, tree\n"
    "           lockstep::allreduce over a list, the section's way, from one thread\n"
    "  memcpy   one copy of the same bytes, on one CPU core: the memory's speed\n"
    "  gloo     c10d's Gloo over the loopback network, as many threads (--peers)\n"
    "  openmpi  MPI_Allreduce between as many processes (--peers)\n"
    "\n"
    "busbw is the bus bandwidth as nccl-tests defines it: 2 (n - 1) / n times the\n"
    "bytes, divided by the time; it can be compared between numbers of ranks.\n"
    "\n"
    "Examples:\n"
    "  lockstep-bench allreduce --devices 2 --peers\n"
    "  lockstep-bench allreduce --devices 4xcpu --sizes 40,516272 --json sums.json\n";

using Clock = std::chrono::steady_clock;

struct BenchAllreduceFlags {
  std::optional<std::string> devices;
  std::string json, plot;
  std::vector<int64_t> sizes = {40, 4000, 65536, 516272, 4000000, 24000000};
  int rounds = 10;
  bool peers = false;
};

struct Size {
  int64_t bytes;
  BestTimes best = {};
};
using Sizes = std::vector<Size>;

// Gives a number of calls that makes the clock's error small, and that takes no size long.
int calls_for(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>(50'000'000 / bytes, 5, 2000));
}

torch::Tensor zeros(int64_t bytes, const c10::Device& device) {
  return torch::zeros({bytes / 4}, torch::TensorOptions().device(device));
}

// Gives the seconds per call of `call`. The first calls are not counted. `wait` waits until all calls are done.
double time_of(
    int64_t bytes, const std::function<void()>& call, const std::function<void()>& wait = [] {}) {
  const int calls = calls_for(bytes);
  for (int i = 0; i < std::max(calls / 10, 2); ++i) call();
  wait();
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  wait();
  return std::chrono::duration<double>(Clock::now() - start).count() / calls;
}

void time_ranks(const Devices& devices, Sizes& sizes) {
  run(devices, [&](Rank& rank) {
    for (auto& size : sizes) {
      const torch::Tensor tensor = zeros(size.bytes, rank.device());
      rank.barrier();
      const double seconds = time_of(
          size.bytes, [&] { rank.allreduce(tensor); }, [&] { synchronize_users(rank); });
      if (rank.index() == 0) size.best.add("ranks", seconds);
    }
  });
}

void time_grains(const Devices& devices, Sizes& sizes) {
  const auto ranks = static_cast<int64_t>(devices.size());
  std::vector<int64_t> runs(devices.size() + 1);  // where the ranks' ranges of grains begin
  std::iota(runs.begin(), runs.end(), 0);
  run(devices, [&](Rank& rank) {
    for (auto& size : sizes) {
      const int64_t values = (size.bytes / 4 + ranks - 1) / ranks * ranks;
      const torch::Tensor gradients = zeros(4 * values, rank.device());
      rank.barrier();
      const auto average = [&] {
        CommunicationHook::Round round =
            post_grain_average(rank, {gradients}, {.runs = runs, .samples = ranks}, gradients, false);
        for (;; round = round.next()) {
          if (round.work) round.work->wait();
          if (!round.next) break;
        }
        if (round.finish) round.finish();
      };
      const double seconds = time_of(size.bytes, average, [&] { synchronize_users(rank); });
      if (rank.index() == 0) size.best.add("grains", seconds);
    }
  });
}

void time_lists(const Devices& devices, Sizes& sizes) {
  using enum AllreduceAlgorithm;
  for (auto& size : sizes) {
    std::vector<torch::Tensor> tensors;
    for (const auto& device : devices) tensors.push_back(zeros(size.bytes, device));
    const auto wait = [&] {
      for (const auto& device : devices) synchronize(device);
    };
    for (const auto algorithm : {naive, sharded, ring, tree}) {
      size.best.add(std::string(to_string(algorithm)), time_of(
                                                           size.bytes, [&] { allreduce(tensors, algorithm); }, wait));
    }
  }
}

void time_memcpy(Sizes& sizes) {
  for (auto& size : sizes) {
    const std::vector<char> from(size.bytes, 1);
    std::vector<char> to(size.bytes, 2);
    size.best.add("memcpy", time_of(size.bytes, [&] {
                    std::memcpy(to.data(), from.data(), from.size());
                    asm volatile("" : : "r"(to.data()) : "memory");  // the compiler must believe that the copy is read
                  }));
  }
}

void check_cpu(const Devices& devices) {
  if (!devices[0].is_cpu()) throw Error("it adds tensors on the CPU, and these ranks are on " + devices[0].str());
}

void time_gloo(const Devices& devices, Sizes& sizes) {
  check_cpu(devices);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run(devices, [&](Rank& rank) {
    const auto group =
        comm::make_gloo_group({store, rank.index(), rank.world_size(), std::chrono::seconds(60)}, "127.0.0.1");
    for (auto& size : sizes) {
      std::vector<torch::Tensor> tensors{zeros(size.bytes, rank.device())};
      rank.barrier();
      const double seconds = time_of(size.bytes, [&] { group.backend->allreduce(tensors)->wait(); });
      if (rank.index() == 0) size.best.add("gloo", seconds);
    }
    rank.barrier();  // nobody may close its connections before all are done
  });
}

// Starts the peer, which takes pairs BYTES CALLS and prints "BYTES SECONDS" for each.
void time_openmpi(const Devices& devices, Sizes& sizes) {
  check_cpu(devices);
  if (std::string(LOCKSTEP_OPENMPI_PEER).empty()) {
    throw Error("Open MPI's compiler was not there when this was configured; install libopenmpi-dev, then ./dev clean");
  }
  std::vector<std::string> command = {"mpirun", "--allow-run-as-root",          "--oversubscribe",
                                      "-n",     std::to_string(devices.size()), LOCKSTEP_OPENMPI_PEER};
  for (const auto& size : sizes) {
    command.push_back(std::to_string(size.bytes));
    command.push_back(std::to_string(calls_for(size.bytes)));
  }
  std::istringstream lines(run_program(command, std::chrono::minutes(2)));
  for (auto& size : sizes) {
    int64_t bytes = 0;
    double seconds = 0;
    if (!(lines >> bytes >> seconds) || bytes != size.bytes)
      throw Error("its output is not understood", {Error::machine});
    size.best.add("openmpi", seconds);
  }
}

// ---- The report.

const std::vector<std::string> contenders = {"ranks", "grains", "naive", "sharded", "ring",
                                             "tree",  "memcpy", "gloo",  "openmpi"};

double bus_bandwidth(const Size& size, const std::string& name, size_t ranks) {
  const double n = static_cast<double>(ranks);
  return 2 * (n - 1) / n * static_cast<double>(size.bytes) / size.best.of(name);
}

// Gives so many digits that a copy of a few bytes takes more than 0.
std::string microseconds(double seconds) {
  return format(seconds < 1e-7 ? "%.4f" : "%.2f", seconds * 1e6);
}

std::string table_of(const Sizes& sizes, size_t ranks) {
  std::string text = format("%10s  %-8s %11s  %10s  %8s\n", "bytes", "", "us", "busbw GB/s", "memcpys");
  for (const auto& size : sizes) {
    for (const auto& name : contenders) {
      if (!size.best.has(name)) continue;
      const std::string bus = name == "memcpy" ? "" : format("%.2f", bus_bandwidth(size, name, ranks) / 1e9);
      text +=
          format("%10lld  %-8s %11s  %10s  %8.2f\n", static_cast<long long>(size.bytes), name.c_str(),
                 microseconds(size.best.of(name)).c_str(), bus.c_str(), size.best.of(name) / size.best.of("memcpy"));
    }
    text += "\n";
  }
  return text;
}

nlohmann::ordered_json json_of(const Sizes& sizes, const Devices& devices, const BenchAllreduceFlags& flags) {
  nlohmann::ordered_json json = {{"rounds", flags.rounds}};
  for (const auto& size : sizes) {
    for (const auto& name : contenders) {
      if (!size.best.has(name)) continue;
      nlohmann::ordered_json row = {{"bytes", size.bytes}, {"name", name}, {"seconds", size.best.of(name)}};
      if (name != "memcpy") row["bus_bytes_per_second"] = bus_bandwidth(size, name, devices.size());
      json["results"].push_back(std::move(row));
    }
  }
  return json;
}

void draw(const std::string& file, const Sizes& sizes, const Devices& devices) {
  using Json = nlohmann::ordered_json;
  Json lines = Json::array();
  for (const auto& name : contenders) {
    if (!sizes[0].best.has(name)) continue;
    Json points = Json::array();
    for (const auto& size : sizes) points.push_back(Json::array({size.bytes, size.best.of(name) * 1e6}));
    lines.push_back({{"name", name}, {"points", points}});
  }
  const Json chart = {
      {"title", "Microseconds by bytes"}, {"x", "bytes"}, {"log_x", true}, {"log_y", true}, {"lines", lines}};
  write_report_page(file, {}, Json::array({chart}), "allreduce on " + to_string(devices));
}

void check(const BenchAllreduceFlags& flags) {
  for (const int64_t bytes : flags.sizes) {
    if (bytes >= 4 && bytes % 4 == 0) continue;
    throw UsageError("--sizes: " + std::to_string(bytes) + " bytes are not whole floats of 4 bytes each");
  }
}

int allreduce_command(const BenchAllreduceFlags& flags, Output& output) {
  check(flags);
  const Devices devices = devices_from(flags.devices);
  check_devices(devices);
  Sizes sizes;
  for (const int64_t bytes : flags.sizes) sizes.push_back({bytes});

  using Peer = void (*)(const Devices&, Sizes&);
  std::map<std::string, Peer> peers;
  if (flags.peers) peers = {{"gloo", time_gloo}, {"openmpi", time_openmpi}};
  std::map<std::string, std::string> not_measured;  // the contenders that were not measured, and why
  for (int round = 0; round < flags.rounds; ++round) {
    time_ranks(devices, sizes);
    time_grains(devices, sizes);
    time_memcpy(sizes);
    time_lists(devices, sizes);
    for (const auto& [name, time_peer] : peers) {
      if (not_measured.count(name) != 0) continue;
      try {
        time_peer(devices, sizes);
      } catch (const Error& error) {
        not_measured[name] = error.what();
      }
    }
  }
  output.print(format("allreduce on %s, best of %d rounds\n\n", to_string(devices).c_str(), flags.rounds) +
               table_of(sizes, devices.size()));
  for (const auto& [name, reason] : not_measured) output.print(name + ": not measured: " + reason + "\n");
  auto json = json_of(sizes, devices, flags);
  if (!not_measured.empty()) json["not_measured"] = not_measured;
  write_json(flags.json, "allreduce", devices, json);
  if (!flags.plot.empty()) draw(flags.plot, sizes, devices);
  return 0;
}

}  // namespace

Command add_bench_allreduce(CLI::App& bench) {
  CLI::App* const app = bench.add_subcommand("allreduce", "Measure allreduce, by size and algorithm.");
  app->footer(bench_allreduce_explanation);
  const auto flags = std::make_shared<BenchAllreduceFlags>();
  add_devices_flag(*app, flags->devices);
  app->add_option("--sizes", flags->sizes, "bytes of the tensors, separated by commas")
      ->type_name("N,…")
      ->delimiter(',')
      ->default_str("40,4000,65536,516272,4000000,24000000");
  add_rounds_flag(*app, flags->rounds);
  app->add_flag("--peers", flags->peers, "measure Gloo and Open MPI as well");
  add_json_flag(*app, flags->json);
  OptionAdder{*app}("--plot", flags->plot, "FILE", "draw the figures into this file, a page for a browser");
  return {app, [flags](Output& output) { return allreduce_command(*flags, output); }};
}

}  // namespace lockstep::cli
