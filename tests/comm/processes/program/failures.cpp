#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/server/parameter_server.hpp>
#include <lockstep/trainer/fit.hpp>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "data_parallel/grain_terms.hpp"
#include "scenarios.hpp"

namespace {

using lockstep::Rank;
using namespace std::chrono_literals;

void wait_in_a_collective(Rank& rank) {
  rank.allreduce(torch::ones({2, 3}));
}

void poll_in_a_collective(Rank& rank) {
  std::vector<torch::Tensor> tensor{torch::ones({2, 3})};
  const auto work = rank.backend().allreduce(tensor, c10d::AllreduceOptions());
  while (!work->isCompleted()) std::this_thread::sleep_for(1ms);
  work->wait();
}

template <class Fault>
void with_fault_on_rank_1(const lockstep::Devices& devices, lockstep::RunOptions options, Fault&& fault) {
  lockstep::run(
      devices,
      [&](Rank& rank) {
        rank.barrier();  // all are connected
        if (rank.index() == 1) return fault(rank);
        wait_in_a_collective(rank);
      },
      options);
}

}  // namespace

void scenarios::throws(const Setup& setup) {
  lockstep::run(setup.devices, [&](Rank& rank) {
    rank.barrier();
    if (rank.index() == 1) {
      std::this_thread::sleep_for(200ms);
      throw std::runtime_error("out of luck");
    }
    std::vector<torch::Tensor> tensor{torch::ones(2)};
    if (setup.argument == "recv") rank.backend().recv(tensor, 1, 0)->wait();
    wait_in_a_collective(rank);
  });
}

void scenarios::waits_crosswise(const Setup& setup) {
  lockstep::run(setup.devices, [&](Rank& rank) {
    rank.barrier();
    if (rank.index() == 0 && setup.argument == "mixed") return wait_in_a_collective(rank);
    std::vector<torch::Tensor> tensor{torch::ones(2)};
    rank.backend().recv(tensor, 1 - rank.index(), 0)->wait();
  });
}

void scenarios::has_a_batch_fewer(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) {
    Rank group = rank.group(0);  // the group's calls and the barrier are numbered apart
    lockstep::DataParallel net(torch::nn::Linear(4, 2), group, {.bucket_bytes = 1, .first_bucket_bytes = 1});
    const int64_t samples = 2 * rank.world_size();
    for (int batch = rank.index() == 1 ? 1 : 0; batch < 3; ++batch) {
      net.mean(net(torch::ones({2, 4})).sum(), 2, samples).backward();
    }
    rank.barrier();
  });
}

void scenarios::dies_in_a_backward(const Setup& setup) {
  struct Net : torch::nn::Module {
    torch::nn::Linear used = register_module("used", torch::nn::Linear(4, 2));
    torch::nn::Linear spare = register_module("spare", torch::nn::Linear(4, 2));
    at::Tensor forward(const at::Tensor& x) { return used(x); }
  };
  lockstep::run(setup.devices, [](Rank& rank) {
    lockstep::DataParallel net(Net(), rank);
    for (int step = 1;; ++step) {
      const auto loss = net(torch::ones({2, 4})).sum();
      if (step == 3 && rank.index() == 1) std::raise(SIGKILL);
      net.mean(loss, 2, 2 * rank.world_size()).backward();
    }
  });
}

void scenarios::dies_in_an_evaluation(const Setup& setup) {
  std::istringstream words(setup.argument);
  int victim = -1;
  std::string folder;
  words >> victim >> folder;
  struct Net : torch::nn::Module {
    explicit Net(bool dies) : dies(dies) {}
    at::Tensor forward(const at::Tensor& x) {
      if (!is_training()) std::cout << "evaluates\n" << std::flush;
      if (!is_training() && dies) std::raise(SIGKILL);
      return linear(x);
    }
    torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 2));
    const bool dies;
  };
  const auto launch = lockstep::comm::read_launch_environment(std::getenv);
  const bool dies = launch && victim == (launch->member >= 0 ? launch->member : lockstep::this_process().index);
  torch::manual_seed(1);
  const auto x = torch::randn({24, 4}), y = (x.sum(1) > 0).to(torch::kLong);
  lockstep::fit({.name = "signs",
                 .module = [dies] { return Net(dies); },
                 .criterion = torch::nn::functional::cross_entropy,
                 .train = {{x, y}},
                 .test = {{x, y}},
                 .accuracy = true},
                {.devices = setup.devices,
                 .batch = {.size = 12, .grain = 4},
                 .rate = {.lr = 0.1},
                 .epochs = 3,
                 .keep = {.run_dir = folder}});
}

void scenarios::freezes(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) {
    rank.barrier();
    if (rank.index() == 0) std::raise(SIGSTOP);
    wait_in_a_collective(rank);
  });
}

void scenarios::sleeps(const Setup& setup) {
  const auto body = [](Rank& rank) {
    rank.barrier();
    std::cout << "ready\n" << std::flush;
    if (rank.index() == 1) std::this_thread::sleep_for(3s);
    wait_in_a_collective(rank);
  };
  lockstep::run(setup.devices, body, {.timeout = 4s, .silence = 2s});
}

void scenarios::lives(const Setup& setup) {
  lockstep::run(setup.devices, [&](Rank& rank) {
    Rank group = rank.group(0);
    std::cout << "connected\n" << std::flush;
    for (int i = 0; i < 10 || setup.argument == "for_ever"; ++i) {
      std::this_thread::sleep_for(30ms);
      const auto end = std::chrono::steady_clock::now() + 10ms;
      while (std::chrono::steady_clock::now() < end) torch::ones({100, 100}).sum();
      rank.allreduce(torch::ones({2, 3}));
      group.barrier();
    }
    std::cout << "process " + std::to_string(rank.process()) + ": all calls made\n" << std::flush;
  });
}

void scenarios::connects(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) { rank.group(0).barrier(); });
}

// SIGTERM asks for a stop. Until after that rank 1 leaves rank 0 waiting.
void scenarios::is_asked_to_stop(const Setup& setup) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // blocked in all threads that follow
  std::stop_source stop;
  std::thread([stop, signals]() mutable {
    int signal = 0;
    sigwait(&signals, &signal);
    stop.request_stop();
  }).detach();
  const auto body = [&](Rank& rank) {
    rank.barrier();
    if (rank.index() == 1) {
      std::cout << "ready\n" << std::flush;
      if (setup.argument == "freezes") std::raise(SIGSTOP);
      if (setup.argument == "sleeps") std::this_thread::sleep_for(8s);
      while (setup.argument == "computes" && !stop.stop_requested()) std::this_thread::sleep_for(1ms);
      const auto end = std::chrono::steady_clock::now() + 3s;
      while (setup.argument == "computes" && std::chrono::steady_clock::now() < end) torch::ones({100, 100}).sum();
    }
    wait_in_a_collective(rank);
  };
  try {
    lockstep::run(setup.devices, body, {.stop = stop.get_token(), .silence = 30s});
  } catch (const lockstep::Stopped&) {
    std::cout << "stopped\n" << std::flush;
    throw;
  }
}

// Rank 1 writes "abc" into the run's keys in the store, under the one that the argument names.
void scenarios::has_a_stranger(const Setup& setup) {
  with_fault_on_rank_1(setup.devices, {}, [&](Rank& rank) {
    const auto launch = *lockstep::comm::read_launch_environment(std::getenv);
    const lockstep::comm::WaitLimit limit{10s};
    const auto store = lockstep::comm::Rendezvous(launch, limit).connect("run-1");
    for (int i = 0; i < 2000; ++i) {  // a process may write this key again and again
      store->set(setup.argument, std::string("abc"));
      std::this_thread::sleep_for(1ms);
    }
    wait_in_a_collective(rank);
  });
}

void scenarios::dies(const Setup& setup) {
  with_fault_on_rank_1(setup.devices, {}, [&](Rank&) {
    if (setup.argument == "exit") std::exit(7);
    std::raise(SIGKILL);
  });
}

// Rank 0 sends a tensor that is longer than the system keeps, a short one after it, and one more.
void scenarios::dies_while_it_receives(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) {
    rank.barrier();
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<torch::Tensor> tensors;
    for (const int64_t count : {16'000'000, 2, 2})
      tensors.push_back(rank.index() == 0 ? torch::ones(count) : torch::zeros(count));
    const auto begin = std::chrono::steady_clock::now();
    try {
      for (const auto& one : tensors) {
        std::vector<torch::Tensor> tensor{one};
        works.push_back(rank.backend().broadcast(tensor, c10d::BroadcastOptions()));
      }
      const volatile float* const first = tensors[0].const_data_ptr<float>();
      while (rank.process() == 1 && *first == 0) std::this_thread::sleep_for(10us);
      if (rank.process() == 1) std::raise(SIGKILL);
      works.back()->wait();
    } catch (const lockstep::Error&) {
      const std::chrono::duration<double, std::milli> waited = std::chrono::steady_clock::now() - begin;
      if (rank.index() == 0) std::cout << "rank 0 waited " << std::lround(waited.count()) << " ms\n" << std::flush;
      throw;
    }
  });
}

void scenarios::runs_out_of_memory(const Setup& setup) {
  with_fault_on_rank_1(setup.devices, {}, [&](Rank& rank) {
    if (setup.argument == "vector") std::vector<char> bytes(PTRDIFF_MAX / 2);
    if (setup.argument == "tensor") torch::empty({int64_t{1} << 50});
    std::ifstream sizes("/proc/self/statm");
    rlim_t pages = 0;
    sizes >> pages;
    const rlim_t bytes = pages * sysconf(_SC_PAGESIZE) + (200 << 20);
    const rlimit limit{bytes, bytes};
    setrlimit(RLIMIT_AS, &limit);
    for (std::vector<torch::Tensor> kept;;) kept.push_back(torch::empty({2 << 20}));
  });
}

// Rank 2 keeps the parameters for ranks 0 and 1, until the rank that the argument names is killed.
void scenarios::serves(const Setup& setup) {
  lockstep::run(setup.devices, [&](Rank& rank) {
    const auto kill = [&] {
      if (std::to_string(rank.index()) == setup.argument) std::raise(SIGKILL);
    };
    struct Sgd : torch::optim::SGD {
      Sgd(const std::vector<torch::Tensor>& parameters, std::function<void()> first)
          : SGD(parameters, 0.1), first(std::move(first)) {}
      torch::Tensor step(LossClosure) override {
        first();
        return SGD::step();
      }
      std::function<void()> first;
    };
    torch::nn::Linear net(3, 2);
    lockstep::ParameterServer server(net, rank,
                                     [&](const auto& parameters) { return std::make_unique<Sgd>(parameters, kill); },
                                     {.consistency = lockstep::Consistency::asynchronous});
    server.train([&](lockstep::Worker& worker) {
      for (int step = 0;; ++step) {
        if (step == 3) kill();
        worker.step();
      }
    });
  });
}

void scenarios::reads_on(const Setup& setup) {
  with_fault_on_rank_1(setup.devices, {.timeout = 1s}, [](Rank& rank) {
    const lockstep::Samples slow(1, [](const auto&) {
      std::this_thread::sleep_for(2500ms);
      return lockstep::Dataset{torch::ones({1, 1}), torch::ones({1})};
    });
    lockstep::batches(slow, {.size = 1}).begin();
    wait_in_a_collective(rank);
  });
}

void scenarios::returns_early(const Setup& setup) {
  if (setup.argument.empty()) return with_fault_on_rank_1(setup.devices, {}, [](Rank&) {});
  lockstep::run(setup.devices, [](Rank& rank) {
    rank.barrier();
    if (rank.index() != 1) poll_in_a_collective(rank);
  });
}

void scenarios::asks_in_vain(const Setup& setup) {
  lockstep::run(setup.devices, [&](Rank& rank) {
    rank.barrier();
    std::vector<torch::Tensor> tensor{torch::ones(2)};
    if (rank.index() != 1) return;
    if (setup.argument == "send") {
      rank.backend().send(tensor, 0, 7);
    } else {
      rank.backend().allreduce(tensor, c10d::AllreduceOptions());
    }
  });
}

void scenarios::shares_memory(const Setup& setup) {
  const torch::Tensor one = torch::ones(100);
  lockstep::run(setup.devices, [&](Rank& rank) {
    rank.barrier();
    rank.allreduce(one);
  });
}

void scenarios::calls_otherwise(const Setup& setup) {
  with_fault_on_rank_1(setup.devices, {}, [&](Rank& rank) {
    if (setup.argument == "max") return rank.allreduce(torch::ones({2, 3}), c10d::ReduceOp::MAX);
    if (setup.argument == "long") return rank.allreduce(torch::ones(1'000'000));
    if (setup.argument == "empty") return rank.allreduce(torch::ones(0));
    rank.broadcast(torch::ones(5));
  });
}

void scenarios::calls_otherwise_in_a_group(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) {
    Rank group = rank.group(rank.index() < 2 ? 0 : 1);  // ranks 0 and 1, and all others
    if (rank.index() == 1) return group.broadcast(torch::ones(5));
    rank.index() == 0 ? wait_in_a_collective(group) : wait_in_a_collective(rank);
  });
}

// Rank 1 expects one row more of rank 0 than that sends.
void scenarios::parts_do_not_fit(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) {
    const bool expects_more = rank.index() == 1;
    std::vector<int64_t> sends(rank.world_size(), 2), expects(rank.world_size(), 2);
    if (expects_more) ++expects[0];
    torch::Tensor input = torch::ones({2 * rank.world_size(), 3});
    torch::Tensor output = torch::ones({2 * rank.world_size() + (expects_more ? 1 : 0), 3});
    rank.backend().alltoall_base(output, input, expects, sends, c10d::AllToAllOptions())->wait();
  });
}

// Rank 1 takes others for each rank's grains than the rest do.
void scenarios::grains_of_others(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) {
    std::vector<int64_t> runs;
    for (int other = 0; other <= rank.world_size(); ++other)
      runs.push_back(2 * other + (rank.index() == 1 && other == 1));
    const torch::Tensor row = torch::ones({2 * rank.world_size()});
    lockstep::post_grain_average(rank, {row}, {.runs = runs, .samples = runs.back()}, row, false).work->wait();
  });
}

// Rank 1 waits for a message of rank 0, which fits in number and tag but not in size, or never comes.
void scenarios::message_fails(const Setup& setup) {
  lockstep::run(setup.devices, [&](Rank& rank) {
    rank.barrier();
    std::vector<torch::Tensor> tensor{torch::ones(rank.index() == 1 ? 3 : 1'000'000)};
    if (setup.argument == "dead" && rank.index() == 1) std::raise(SIGKILL);
    while (setup.argument == "dead") rank.backend().send(tensor, 1, 7)->wait();  // until it throws
    if (rank.index() == 1) rank.backend().recv(tensor, 0, setup.argument == "tag" ? 1 << 20 : 7)->wait();
    if (rank.index() == 0 && setup.argument == "size") rank.backend().send(tensor, 1, 7)->wait();
  });
}

void scenarios::is_configured_otherwise(const Setup& setup) {
  with_fault_on_rank_1(setup.devices, {.timeout = std::chrono::seconds(lockstep::this_process().index == 1 ? 77 : 88)},
                       wait_in_a_collective);
}
