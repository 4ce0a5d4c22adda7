#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/server/parameter_server.hpp>

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/process_stat.hpp"
#include "ranks/observed_backend.hpp"
#include "scenarios.hpp"

namespace {

using lockstep::Consistency;
using lockstep::ParameterServer;
using lockstep::Rank;
using lockstep::Worker;
using torch::Tensor;
using namespace std::chrono_literals;

// The process that is lost. It has made two pushes, and is in its third.
constexpr int kVictim = 1;
constexpr double kPush = 100;
constexpr int kPushesAfterwards = 5;

struct Vector : torch::nn::Module {
  Tensor values = register_parameter("values", torch::zeros({5, 2}));
};

void push(Vector& net, Worker& worker, double value) {
  net.values.mutable_grad() = torch::full_like(net.values, value).detach();
  worker.step();
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("it does not hold that " + what);
}

// At the `number`th call of one kind.
class AtACall : public lockstep::CallObserver {
 public:
  AtACall(c10d::OpType type, int number, std::function<void()> act)
      : type_(type), number_(number), act_(std::move(act)) {}
  void posts(c10d::OpType type, int64_t, int) override {
    if (type == type_ && ++calls_ == number_) act_();
  }
  void spent(double) override {}

 private:
  const c10d::OpType type_;
  const int number_;
  const std::function<void()> act_;
  int calls_ = 0;
};

struct SlowSgd : torch::optim::SGD {
  SlowSgd(const std::vector<Tensor>& parameters, std::chrono::milliseconds time) : SGD(parameters, 1.0), time(time) {}
  Tensor step(LossClosure) override {
    std::this_thread::sleep_for(time);
    return SGD::step();
  }
  std::chrono::milliseconds time;
};

// One that has ended keeps its number, as a zombie, until the launcher has seen all of them end.
void wait_until_gone(pid_t process) {
  const auto runs = [folder = "/proc/" + std::to_string(process)] {
    const std::string text = lockstep::io::stat_after_name(folder);
    return !text.empty() && text[0] != 'Z' && text[0] != 'X';
  };
  while (runs()) std::this_thread::sleep_for(1ms);
}

}  // namespace

void scenarios::loses_a_worker(const Setup& setup) {
  const auto has = [&](const char* word) { return setup.argument.find(word) != std::string::npos; };
  const int servers = has("two_servers") ? 2 : 1;
  const auto train = [&](Rank& rank) {
    Tensor pids = torch::zeros({16}, torch::kLong);
    if (rank.index_in_process() == 0) pids[rank.process()] = getpid();
    rank.allreduce(pids);
    const auto victim = static_cast<pid_t>(pids[kVictim].item<int64_t>());
    Tensor processes = torch::zeros({rank.world_size()}, torch::kLong);
    processes[rank.index()] = rank.process();
    rank.allreduce(processes);

    const auto act = [&] {
      if (!has("busy")) std::this_thread::sleep_for(200ms);  // the servers wait for it, or have sent what it waits for
      std::raise(has("freezes") ? SIGSTOP : SIGKILL);
    };
    // Between the third push's messages to the first server, once the first is on its way, or while it waits for the
    // parameters at the end.
    const bool at_the_end = has("at_the_end");
    const auto observer = at_the_end ? std::make_shared<AtACall>(c10d::OpType::RECV, 2 * servers + 1, act)
                                     : std::make_shared<AtACall>(c10d::OpType::SEND, 4 * servers + 2, act);
    const Rank observed = rank.wrapped(
        [&](auto backend) { return c10::make_intrusive<lockstep::ObservedBackend>(std::move(backend), observer); });
    Rank own = rank.process() == kVictim ? observed : rank;
    const auto net = std::make_shared<Vector>();
    const auto make_sgd = [&](const auto& parameters) {
      return std::make_unique<SlowSgd>(parameters, has("busy") ? 100ms : 0ms);
    };
    const auto consistency = has("bounded")       ? Consistency::bounded
                             : has("synchronous") ? Consistency::synchronous
                                                  : Consistency::asynchronous;
    ParameterServer server(net, own, make_sgd,
                           {.servers = servers, .consistency = consistency, .staleness = 2, .piece_bytes = 16});
    const auto body = [&](Worker& worker) {
      if (rank.process() == kVictim) {
        while (rank.index_in_process() > 0) std::this_thread::sleep_for(1s);
        for (int i = 0; i < 2 || !at_the_end; ++i) push(*net, worker, kPush);
        std::this_thread::sleep_for(500ms);  // until the others are done
        return;
      }
      while (has("synchronous")) push(*net, worker, 1);
      while (net->values.max().item<double>() > -2 * kPush) has("busy") ? push(*net, worker, 0) : worker.pull();
      if (!has("freezes") && !at_the_end) wait_until_gone(victim);
      for (int i = 0; i < kPushesAfterwards; ++i) push(*net, worker, 1);
    };
    const int workers = rank.world_size() - servers;
    std::vector<int> victims;
    for (int worker = 0; worker < workers; ++worker) {
      if (processes[worker].item<int64_t>() == kVictim) victims.push_back(worker);
    }
    const auto require_lost = [&](const std::vector<lockstep::LostWorker>& lost) {
      require(lost.size() == victims.size(), "all victims and nobody else was lost");
      for (size_t i = 0; i < lost.size(); ++i) {
        require(lost[i].worker == victims[i], "the victim is worker " + std::to_string(victims[i]));
        require(lost[i].reason.starts_with("the process of rank"),
                "the reason is the process's end: " + lost[i].reason);
      }
    };
    const auto pushed = static_cast<double>(kPushesAfterwards * (workers - victims.size()));
    require_lost(server.train(body));
    require(net->values.equal(torch::full({5, 2}, -2 * kPush - pushed)), "all whole pushes count");
    if (has("then_trains")) {
      require_lost(server.train([&](Worker& worker) {
        for (int i = 0; i < kPushesAfterwards; ++i) push(*net, worker, 1);
      }));
      require(net->values.equal(torch::full({5, 2}, -2 * kPush - 2 * pushed)), "the pushes of both trainings count");
    }
    if (has("then_meets")) rank.barrier();
    if (has("then_comes_back") && rank.index() == 0) {
      ::kill(victim, SIGCONT);
      wait_until_gone(victim);
    }
  };
  lockstep::run(setup.devices, train, {.silence = has("freezes") ? 2s : 6s});
  if (has("then_runs")) lockstep::run(setup.devices, [](Rank& rank) { rank.barrier(); });
}
