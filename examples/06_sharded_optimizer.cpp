// A sharded optimizer (ZeRO): with DataParallel every rank keeps all of the optimizer's state, and all gradients, and
// they are the same on every rank. A ShardedOptimizer divides them among the ranks, and trains the same network.
//
//   stage 1  each rank keeps, and updates with, its slice of the optimizer's state: Adam's is twice the parameters.
//   stage 2  of the averaged gradients too.
//   stage 3  of the parameters too. The rest is gathered when an operator is about to read it, and given back.
//
// It sends as many bytes as DataParallel does, with stage 3 half as many again. lockstep train has --zero-stage.
//
//   example_06_sharded_optimizer
//
// Expected output, in double precision, so that the digits are the same on every machine (with CPU ranks, also where
// there are GPUs). Bytes are those of a rank. Gradients are counted between backward and update: with stage 1 all of
// them, and the averages of its slice; later the latter, and 32 bytes by which step() notices who changes .grad.
// Parameters are counted after the update. Slices begin at whole lines of 64 values. (During backward stage 2 needs two
// buckets more, of about bucket_bytes each, and stage 3 as much for parameters.)
//
//   2 ranks, Adam on each   loss 0.092514  bytes of state 79936, gradients 39968, parameters 39968
//   2 ranks, stage 1        loss 0.092514  bytes of state 40000, gradients 61440, parameters 40960
//   2 ranks, stage 2        loss 0.092514  bytes of state 40000, gradients 20512, parameters 40960
//   4 ranks, stage 2        loss 0.092514  bytes of state 19520, gradients 10272, parameters 40960
//   4 ranks, stage 3        loss 0.092514  bytes of state 19520, gradients 10272, parameters 10240
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <iostream>
#include <map>

namespace {

using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
namespace F = torch::nn::functional;

struct Net : torch::nn::Module {
  Net() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return output(torch::relu(middle(torch::relu(input(x))))); }

  Linear input = register_module("input", Linear(8, 64));
  Linear middle = register_module("middle", Linear(64, 64));
  Linear output = register_module("output", Linear(64, 4));
};

// The same weights on every rank and in every run.
std::shared_ptr<Net> make_net(Rank& rank) {
  return rank.in_turn([] {
    torch::manual_seed(1);
    return std::make_shared<Net>();
  });
}

// The data: of eight numbers in [-1, 1], the signs of two products, which are four classes.
lockstep::Dataset make_data() {
  torch::manual_seed(2);
  const Tensor x = torch::rand({600, 8}, torch::kDouble) * 2 - 1;
  const auto positive = [&](int i, int j) { return (x.select(1, i) * x.select(1, j) > 0).to(torch::kLong); };
  return {x, positive(0, 1) + 2 * positive(2, 3)};
}

// Adam's two averages of every parameter that it has.
size_t bytes_of_state(torch::optim::Optimizer& adam) {
  size_t bytes = 0;
  for (const auto& [parameter, state] : adam.state()) {
    const auto& averages = static_cast<const torch::optim::AdamParamState&>(*state);
    bytes += averages.exp_avg().nbytes() + averages.exp_avg_sq().nbytes();
  }
  return bytes;
}

// The memory behind these tensors, each piece of it once.
size_t bytes_behind(const std::vector<Tensor>& tensors) {
  std::map<const void*, size_t> pieces;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) pieces[tensor.storage().data()] = tensor.storage().nbytes();
  }
  size_t bytes = 0;
  for (const auto& [place, size] : pieces) bytes += size;
  return bytes;
}

// `optimizer` is what a loop calls; `adam` is it, or has this rank's slices.
template <class Optimizer>
void train(const char* what, lockstep::DataParallel<Net>& net, Optimizer& optimizer, torch::optim::Optimizer& adam,
           Rank& rank, const lockstep::Dataset& data) {
  auto parameters = net->parameters();
  for (const auto& slice : adam.param_groups()[0].params()) parameters.push_back(slice);
  std::vector<Tensor> gradients;
  size_t bytes_of_gradients = 0;
  for (int epoch = 0; epoch < 10; ++epoch) {
    for (auto& batch : lockstep::batches(data, {.size = 64, .epoch = epoch}, rank)) {
      optimizer.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      gradients.clear();
      for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
      bytes_of_gradients = bytes_behind(gradients);
      optimizer.step();
    }
  }
  const size_t bytes_of_parameters = bytes_behind(parameters);
  const double loss = F::cross_entropy(net(data.x), data.y).item<double>();  // with stage 3 all ranks must compute it
  if (rank.index() != 0) return;
  std::printf("%-22s  loss %.6f  bytes of state %5zu, gradients %5zu, parameters %5zu\n", what, loss,
              bytes_of_state(adam), bytes_of_gradients, bytes_of_parameters);
}

std::unique_ptr<torch::optim::Optimizer> make_adam(std::vector<Tensor> parameters) {
  return std::make_unique<torch::optim::Adam>(std::move(parameters), /*lr=*/0.01);
}

void whole(const char* what, Rank& rank, const lockstep::Dataset& data) {
  lockstep::DataParallel net(make_net(rank), rank);
  const auto adam = make_adam(net->parameters());
  train(what, net, *adam, *adam, rank, data);
}

// Here make_adam is given this rank's slices. Between runs the whole state can be kept, by name: optimizer.state().
void sharded(const char* what, int stage, Rank& rank, const lockstep::Dataset& data) {
  lockstep::DataParallel net(make_net(rank), rank, {.average = false});
  lockstep::ShardedOptimizer optimizer(net, make_adam, {.stage = stage});
  train(what, net, optimizer, optimizer.optimizer(), rank, data);
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  const lockstep::Devices two(2, torch::kCPU), four(4, torch::kCPU);
  lockstep::run(two, [&](Rank& rank) { whole("2 ranks, Adam on each", rank, data); });
  lockstep::run(two, [&](Rank& rank) { sharded("2 ranks, stage 1", 1, rank, data); });
  lockstep::run(two, [&](Rank& rank) { sharded("2 ranks, stage 2", 2, rank, data); });
  lockstep::run(four, [&](Rank& rank) { sharded("4 ranks, stage 2", 2, rank, data); });
  lockstep::run(four, [&](Rank& rank) { sharded("4 ranks, stage 3", 3, rank, data); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
