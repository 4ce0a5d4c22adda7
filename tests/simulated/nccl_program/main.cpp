// The program that nccl_processes_test starts several times: ranks over NCCL's stand-in on simulated GPUs.
//
//   nccl_ranks training|own_loop DEVICES FILE | nccl_ranks collectives DEVICES | nccl_ranks fails DEVICES WHERE-HOW
//
// WHERE: what does not go well in the process of rank 1. HOW: "killed", "throws" or "early" (it returns).
#include <ATen/Parallel.h>
#include <signal.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include <atomic>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>

#include "collectives.hpp"
#include "comm/processes/program/scenarios.hpp"
#include "replayed_sums.hpp"
#include "simulated_gpu/nccl/communicator.hpp"
#include "support/simulated_device.hpp"

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

void fails(const lockstep::Devices& devices, const std::string& where_and_how) {
  const std::string where = where_and_how.substr(0, where_and_how.find('-'));
  const bool throws = where_and_how.ends_with("throws"), here = lockstep::this_process().index == 1;
  const auto fault = [throws] {
    if (throws) throw std::runtime_error("out of luck");
    raise(SIGKILL);
  };
  auto& faults = simulated::faults();
  if (here && where == "init") faults.in_init = fault;
  if (here && where == "kernel") faults.in_kernel = fault;
  if (here && where == "shutdown") faults.in_shutdown = fault;
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
                      if (here) faults.in_kernel = fault;
                    });
                  }
                  if (here && where == "return") return;
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
                {.timeout = 60s});
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
    if (scenario == "fails") fails(devices, argument);
    std::cout << name + "ok\n" << std::flush;
    return 0;
  } catch (const lockstep::Error& error) {
    std::cerr << name + error.what() + "\n";
    lockstep::simulated::take_reports();  // drops reports of kernels that an abort has ended
    return 3;
  }
}
