// The program that nccl_processes_test starts several times: ranks over NCCL's stand-in on simulated GPUs. A build with
// CUDA makes it too, over real NCCL, for benchmarks/gpu_report.
//
//   nccl_ranks training|own_loop DEVICES FILE | nccl_ranks collectives|replays|recorded DEVICES
//   nccl_ranks fails DEVICES WHERE-HOW
//
// WHERE: what does not go well in the process of rank 1. HOW: "killed", "throws", "early" (it returns) or "differs".
#include <ATen/Parallel.h>
#include <signal.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/fit.hpp>

#include <cmath>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "collectives.hpp"
#include "comm/processes/program/scenarios.hpp"
#include "faults.hpp"
#include "replayed_sums.hpp"

namespace {

using namespace std::chrono_literals;
using lockstep::Rank;

void calls_on(Rank& rank) {
  for (int call = 0; call < 100; ++call) {
    const torch::Tensor sum = lockstep::one_to(rank, 3);
    rank.allreduce(sum);
    sum.cpu();  // waits for the device
  }
}

// Steps whose exchange is in a graph.
void replays_on(Rank& rank, const std::function<void()>& meanwhile) {
  lockstep::ReplayedSums sums(rank);
  sums.steps(lockstep::ReplayedSums::kSomeSteps);
  sums.sum();
  meanwhile();
  sums.steps(500);
}

void replay_sums(Rank& rank) {
  lockstep::ReplayedSums sums(rank);
  for (int step = 0; step < 100; ++step) {
    sums.step(static_cast<float>(step * (rank.index() + 1)));
    const auto expected = static_cast<float>(step * rank.world_size() * (rank.world_size() + 1)) / 2;
    if (sums.sum() != expected) throw std::runtime_error("step " + std::to_string(step) + " has another sum");
  }
}

// Trains by ordinary and by recorded steps, which must come to the same losses but for the order of sums.
void train_recorded(const lockstep::Devices& devices) {
  torch::manual_seed(1);
  const auto x = torch::randn({200, 4}), y = (x.sum(1) > 0).to(torch::kLong);
  const lockstep::Task task{
      .name = "signs",
      .module =
          [] { return torch::nn::Sequential(torch::nn::Linear(4, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2)); },
      .criterion = torch::nn::functional::cross_entropy,
      .train = {{x, y}}};
  using lockstep::TrainOptions;
  const std::vector<std::function<void(TrainOptions&)>> kinds = {
      [](TrainOptions&) {},
      [](TrainOptions& o) { o.batch.grain = 5; },
      [](TrainOptions& o) { o.batch.accumulate = 2; },
      [](TrainOptions& o) { o.way = lockstep::Averaged{lockstep::Rounding::bf16}; },
      [](TrainOptions& o) { o.way = lockstep::Sharded::state; },
      [](TrainOptions& o) { o.way = lockstep::Sharded::gradients; },
  };
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const auto train = [&](bool cuda_graph) {
      TrainOptions options{
          .devices = devices, .cuda_graph = cuda_graph, .batch = {.size = 20}, .rate = {.lr = 0.1}, .epochs = 5};
      kinds[kind](options);
      std::vector<double> losses;
      lockstep::fit(task, options, {.on_epoch = [&](const auto& metrics) { losses.push_back(metrics.train_loss); }});
      return losses;
    };
    const auto ordinary = train(false), recorded = train(true);
    for (size_t epoch = 0; epoch < ordinary.size(); ++epoch) {
      if (std::abs(recorded[epoch] - ordinary[epoch]) < 1e-3 * ordinary[0]) continue;
      throw std::runtime_error(
          c10::str("kind ", kind, ", epoch ", epoch + 1, ": loss ", recorded[epoch], ", not ", ordinary[epoch]));
    }
  }
}

void fails(const lockstep::Devices& devices, const std::string& where_and_how) {
  const std::string where = where_and_how.substr(0, where_and_how.find('-'));
  const bool throws = where_and_how.ends_with("throws"), here = lockstep::this_process().index == 1;
  const auto say = [] { std::cout << "fails now\n" << std::flush; };
  const auto fault = [throws, say] {
    say();
    if (throws) throw std::runtime_error("out of luck");
    raise(SIGKILL);
  };
  if (here && (where == "init" || where == "kernel" || where == "shutdown")) lockstep::plant_in_nccl(where, fault);
  lockstep::run(devices,
                [&](Rank& rank) {
                  if (where == "shutdown") return rank.barrier();
                  if (where == "values") {
                    rank.barrier();
                    if (rank.index() == 1) fault();
                    const torch::Tensor sum = lockstep::one_to(rank, 3);
                    std::vector<torch::Tensor> tensors{sum};
                    rank.backend().allreduce(tensors)->wait();
                    sum.cpu();       // ends with what was there
                    rank.barrier();  // throws
                    std::cout << "goes on\n";
                    return;
                  }
                  if (here && where == "first") fault();
                  if (here && where == "call") {
                    std::vector<torch::Tensor> tensors{lockstep::one_to(rank, 3)};
                    rank.backend().allreduce(tensors);
                    fault();
                  }
                  if (where == "call") std::this_thread::sleep_for(300ms);
                  if (where == "replay") {
                    return replays_on(rank, [&] {
                      if (here && throws) fault();  // the others replay
                      if (here) lockstep::plant_in_nccl("kernel", fault);
                    });
                  }
                  if (here && where == "return") return say();
                  if (where == "size") {
                    rank.barrier();
                    if (here) say();
                    rank.allreduce(lockstep::one_to(rank, here ? 3'000'000 : 3));
                    return;
                  }
                  if (where == "group") {
                    rank.barrier();
                    if (here) {
                      rank.allgather(torch::zeros({}, torch::TensorOptions(rank.device()).dtype(torch::kLong)));
                      fault();
                    }
                    rank.group(0);
                  }
                  calls_on(rank);
                },
                {.timeout = where == "size" ? 3s : 60s});
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::string scenario = argc > 1 ? argv[1] : "", argument = argc > 3 ? argv[3] : "";
  const std::string name = "process " + std::to_string(lockstep::this_process().index) + ": ";
  try {
    const auto devices = lockstep::parse_devices(argc > 2 ? argv[2] : "");
    if (scenario == "training") scenarios::training({devices, argument});
    if (scenario == "own_loop") scenarios::own_loop({devices, argument});
    if (scenario == "collectives") lockstep::run(devices, lockstep::make_every_call);
    if (scenario == "replays") lockstep::run(devices, replay_sums);
    if (scenario == "recorded") train_recorded(devices);
    if (scenario == "fails") fails(devices, argument);
    std::cout << name + "ok\n" << std::flush;
    return 0;
  } catch (const lockstep::Error& error) {
    std::cerr << name + error.what() + "\n";
    lockstep::drop_reports();
    return 3;
  }
}
