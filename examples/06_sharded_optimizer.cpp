// A sharded net (ZeRO): with a plain DataParallel every rank keeps all of the optimizer's state, and all gradients, and
// they are the same on every rank. By one option of the net they are shared out among the ranks, and the same network
// is trained.
//
//   Sharded::state       each rank keeps, and updates with, its slice of the optimizer's state: Adam's is twice the
//                        parameters.
//   Sharded::gradients   and of the averaged gradients.
//   Sharded::parameters  and of the parameters. The rest is gathered when an operator is about to read it, and given
//                        back.
//
// It sends as many bytes as a plain DataParallel does, with Sharded::parameters half as many again. lockstep train has
// --zero-stage.
//
//   example_06_sharded_optimizer
//
// Expected output, in double precision, so that the digits are the same on every machine (with CPU ranks, also where
// there are GPUs). Bytes are those of a rank. Gradients are those that step() uses, and the memory that they lie in.
// Parameters are counted after the update. Slices begin at whole lines of 64 values. (During backward each needs memory
// of buckets too: with Sharded::state of all, which it keeps; with Sharded::gradients of two, and those that have begun
// to fill; with Sharded::parameters of one, and of two for parameters.)
//
//   2 ranks, nothing        loss 0.092514  bytes of state 79936, gradients 39968, parameters 39968
//   2 ranks, state          loss 0.092514  bytes of state 40000, gradients 20480, parameters 40960
//   2 ranks, gradients      loss 0.092514  bytes of state 40000, gradients 20480, parameters 40960
//   4 ranks, gradients      loss 0.092514  bytes of state 19520, gradients 10240, parameters 40960
//   4 ranks, parameters     loss 0.092514  bytes of state 19520, gradients 10240, parameters 10240
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <iostream>
#include <map>

namespace {

using lockstep::Rank;
using lockstep::Sharded;
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
size_t bytes_of_state(const torch::optim::Optimizer& adam) {
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

void train(const char* what, Sharded sharded, Rank& rank, const lockstep::Dataset& data) {
  const auto module = make_net(rank);
  lockstep::DataParallel net(module, rank, {.sharded = sharded});
  lockstep::Optimizer adam(net, torch::optim::AdamOptions(/*lr=*/0.01));
  size_t bytes_of_gradients = 0;
  for (int epoch = 0; epoch < 10; ++epoch) {
    for (auto& batch : lockstep::batches(data, {.size = 64, .epoch = epoch}, rank)) {
      adam.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      bytes_of_gradients = bytes_behind(adam.gradients());
      adam.step();
    }
  }
  auto parameters = module->parameters();
  for (const auto& slice : adam.inner().param_groups()[0].params()) parameters.push_back(slice);
  const size_t bytes_of_parameters = bytes_behind(parameters);
  // With Sharded::parameters all ranks must compute it.
  const double loss = F::cross_entropy(net(data.x), data.y).item<double>();
  if (rank.index() != 0) return;
  std::printf("%-22s  loss %.6f  bytes of state %5zu, gradients %5zu, parameters %5zu\n", what, loss,
              bytes_of_state(adam.inner()), bytes_of_gradients, bytes_of_parameters);
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  const lockstep::Devices two(2, torch::kCPU), four(4, torch::kCPU);
  lockstep::run(two, [&](Rank& rank) { train("2 ranks, nothing", Sharded::nothing, rank, data); });
  lockstep::run(two, [&](Rank& rank) { train("2 ranks, state", Sharded::state, rank, data); });
  lockstep::run(two, [&](Rank& rank) { train("2 ranks, gradients", Sharded::gradients, rank, data); });
  lockstep::run(four, [&](Rank& rank) { train("4 ranks, gradients", Sharded::gradients, rank, data); });
  lockstep::run(four, [&](Rank& rank) { train("4 ranks, parameters", Sharded::parameters, rank, data); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
