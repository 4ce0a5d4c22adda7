// BatchNorm on several devices: it normalises over the samples that a device has. With a part of the batch each, what
// devices compute is no longer what one device would, and their running statistics differ.
//
//   per device      the default: nothing is exchanged. Before an evaluation average_running_statistics() makes one
//                   network of the ranks' again.
//   synchronised    convert_sync_batchnorm(): over all devices' samples, as one device would. Two more exchanges per
//                   layer and step; worth it where a device has few samples.
//
// lockstep train averages before each evaluation, and has --sync-batchnorm.
//
//   example_07_batchnorm
//
// Expected output, in double precision, so that the digits are the same on every machine (with CPU ranks, also where
// there are GPUs). The losses are those of each rank's network, in eval mode:
//
//   one device                        loss 0.410607
//   two ranks, each by itself         loss 0.489485  loss 0.491879
//     their statistics averaged       loss 0.487589  loss 0.487589
//   two ranks, synchronised           loss 0.410607  loss 0.410607
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <iostream>

namespace {

using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

// The BatchNorm is a layer of a Sequential, where another layer can take its place. As a member of type BatchNorm1d it
// could not be replaced: convert_sync_batchnorm() says so, and SyncBatchNorm can be the member's type.
struct Net : torch::nn::Module {
  Net() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return output(hidden->forward(x)); }

  Sequential hidden =
      register_module("hidden", Sequential(Linear(8, 64), torch::nn::BatchNorm1d(64), torch::nn::ReLU()));
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

// Returns how many samples this rank has trained on.
int64_t train(lockstep::DataParallel<Net>& net, Rank& rank, const lockstep::Dataset& data) {
  torch::optim::SGD sgd(net->parameters(), /*lr=*/0.1);
  int64_t samples = 0;
  for (int epoch = 0; epoch < 10; ++epoch) {
    for (auto& batch : lockstep::batches(data, {.size = 20, .epoch = epoch}, rank)) {
      sgd.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      sgd.step();
      samples += batch.size();
    }
  }
  return samples;
}

void report(const char* what, lockstep::DataParallel<Net>& net, Rank& rank, const lockstep::Dataset& data) {
  const torch::NoGradGuard no_grad;
  net->eval();
  Tensor losses = torch::zeros(rank.world_size(), torch::kDouble);
  losses[rank.index()] = F::cross_entropy(net(data.x), data.y);
  rank.allreduce(losses);
  if (rank.index() != 0) return;
  std::printf("%-32s", what);
  for (int i = 0; i < rank.world_size(); ++i) std::printf("  loss %.6f", losses[i].item<double>());
  std::printf("\n");
}

void per_device(Rank& rank, const lockstep::Dataset& data) {
  lockstep::DataParallel net(make_net(rank), rank);
  const int64_t samples = train(net, rank, data);
  if (rank.world_size() == 1) return report("one device", net, rank, data);
  report("two ranks, each by itself", net, rank, data);
  lockstep::average_running_statistics(net, samples);
  report("  their statistics averaged", net, rank, data);
}

void synchronised(Rank& rank, const lockstep::Dataset& data) {
  const auto module = make_net(rank);
  lockstep::convert_sync_batchnorm(*module, rank);  // before DataParallel, which asks whether it has to exchange
  lockstep::DataParallel net(module, rank);
  train(net, rank, data);
  report("two ranks, synchronised", net, rank, data);
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  const lockstep::Devices one = {torch::kCPU}, two(2, torch::kCPU);
  lockstep::run(one, [&](Rank& rank) { per_device(rank, data); });
  lockstep::run(two, [&](Rank& rank) { per_device(rank, data); });
  lockstep::run(two, [&](Rank& rank) { synchronised(rank, data); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
