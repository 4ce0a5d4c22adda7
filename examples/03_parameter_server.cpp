// A parameter server: some ranks keep the parameters, the others compute gradients, push them there and pull what has
// become of the parameters. Without it, all ranks add up gradients after every step, and wait for the slowest.
//
//   synchronous    a step waits for all workers' gradients: the same training as without servers. For comparison, and
//                  where the sums are better kept away from the ranks that compute.
//   asynchronous   nobody waits for anybody: every push is an update, of parameters that others may have changed since
//                  the worker pulled them. For workers of unequal speed, and for workers that may fail.
//   bounded        between the two: a worker waits once it is so many steps ahead of the slowest.
//
// If workers seldom share parameters, as with rows of an embedding, asynchronous updates seldom meet; with
// Embedding's sparse(true) a worker sends the rows alone that its batch uses.
//
//   example_03_parameter_server
//
// Expected output, with CPU ranks, also where there are GPUs. In the last three lines the losses depend on the order
// in which pushes arrive, and are a little different every time:
//
//   two ranks, no server       loss 0.319723
//   synchronous, one server    loss 0.319723
//   synchronous, two servers   loss 0.319723
//   asynchronous               loss 0.216426
//   at most two steps ahead    loss 0.291563
//   asynchronous, one is lost  loss 0.240631, without worker 1: its machine was turned off
#include <lockstep/lab.hpp>
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <iostream>
#include <stdexcept>

namespace {

using lockstep::Consistency;
using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

constexpr int kEpochs = 10;

// The same weights on every rank, in double precision, so that the digits are the same on every machine.
Sequential make_net(Rank& rank) {
  return rank.in_turn([] {
    torch::manual_seed(1);
    Linear in(8, 64), out(64, 4);  // one after the other, since each draws its weights
    Sequential net(in, torch::nn::ReLU(), out);
    net->to(torch::kDouble);
    return net;
  });
}

// The data: of eight numbers in [-1, 1], the signs of two products, which are four classes.
lockstep::Dataset make_data() {
  torch::manual_seed(2);
  const Tensor x = torch::rand({600, 8}, torch::kDouble) * 2 - 1;
  const auto positive = [&](int i, int j) { return (x.select(1, i) * x.select(1, j) > 0).to(torch::kLong); };
  return {x, positive(0, 1) + 2 * positive(2, 3)};
}

std::unique_ptr<torch::optim::Optimizer> make_sgd(std::vector<Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(/*lr=*/0.1).momentum(0.9));
}

// The loss over the whole data, from rank 0.
void report(const char* scheme, Rank& rank, Sequential& net, const lockstep::Dataset& data,
            const std::vector<lockstep::LostWorker>& lost = {}) {
  if (rank.index() != 0) return;
  std::printf("%-25s  loss %.6f", scheme, F::cross_entropy(net->forward(data.x), data.y).item<double>());
  for (const auto& [worker, reason] : lost) std::printf(", without worker %d: %s", worker, reason.c_str());
  std::printf("\n");
}

void without_server(Rank& rank, const lockstep::Dataset& data) {
  lockstep::DataParallel net(make_net(rank), rank);
  const auto sgd = make_sgd(net->parameters());
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (auto& batch : lockstep::batches(data, {.size = 64, .epoch = epoch}, rank)) {
      sgd->zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      sgd->step();
    }
  }
  auto whole = Sequential(std::static_pointer_cast<torch::nn::SequentialImpl>((*net).shared_from_this()));
  report("two ranks, no server", rank, whole, data);
}

// The ranks that `options` makes servers have the optimizer. What the workers do is a function of its own.
void with_servers(const char* scheme, const lockstep::ParameterServerOptions& options, Rank& rank,
                  const lockstep::Dataset& data, void (*end_of_worker_1)() = nullptr) {
  auto net = make_net(rank);
  lockstep::ParameterServer server(net, rank, make_sgd, options);
  const auto lost = server.train([&](lockstep::Worker& worker) {
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      if (worker.index() == 1 && epoch == kEpochs / 2 && end_of_worker_1 != nullptr) end_of_worker_1();
      for (auto& batch : lockstep::batches(data, {.size = 64, .epoch = epoch}, worker)) {  // this worker's part
        net->zero_grad();
        worker.backward(F::cross_entropy(net->forward(batch.x), batch.y), batch);
        worker.step();  // push the gradients, pull the parameters
      }
    }
  });
  report(scheme, rank, net, data, lost);
}

void turn_off() {
  throw std::runtime_error("its machine was turned off");
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  const lockstep::ParameterServerOptions asynchronous{.consistency = Consistency::asynchronous};
  const lockstep::Devices two(2, torch::kCPU), three(3, torch::kCPU), four(4, torch::kCPU);
  lockstep::run(two, [&](Rank& rank) { without_server(rank, data); });
  lockstep::run(three, [&](Rank& rank) { with_servers("synchronous, one server", {}, rank, data); });
  lockstep::run(four, [&](Rank& rank) { with_servers("synchronous, two servers", {.servers = 2}, rank, data); });
  lockstep::run(three, [&](Rank& rank) { with_servers("asynchronous", asynchronous, rank, data); });
  const lockstep::ParameterServerOptions bounded{.consistency = Consistency::bounded, .staleness = 2};
  lockstep::run(three, [&](Rank& rank) { with_servers("at most two steps ahead", bounded, rank, data); });
  lockstep::run(three,
                [&](Rank& rank) { with_servers("asynchronous, one is lost", asynchronous, rank, data, turn_off); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
