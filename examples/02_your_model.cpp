// A network of your own, split in every way that the section names: by data, by layers, by channels, and combined. Each
// scheme trains from the same weights over the same batches, and ends with the same loss; what differs is what a rank
// holds and what the ranks tell each other.
//
//   by data      each rank holds all of the network and computes its part of a batch; gradients are averaged. The
//                simplest, for any network that fits on one device: try this first.
//   by layers    each rank holds some of the layers; activations cross between neighbours. For networks that do not fit
//                on one device, and slow links: only activations at the cuts are sent. Ranks wait for each other.
//   by channels  each rank holds a slice of every layer; each layer's result is put together. For layers that are too
//                large for one device, and fast links: ranks exchange activations in nearly every layer.
//   combined     for many devices: slices within a machine, stages between machines, replicas of all of that.
//
// `lockstep-bench compare` measures the schemes on a machine, `lockstep plan` predicts which is best.
//
//   example_02_your_model
//
// Expected output, in double precision, so that the digits are the same on every machine (with CPU ranks, also where
// there are GPUs):
//
//   one device            loss 0.323301  parameter bytes per rank 70432
//   by data               loss 0.323301  parameter bytes per rank 70432 70432
//   by layers             loss 0.323301  parameter bytes per rank 35840 34592
//   by channels           loss 0.323301  parameter bytes per rank 35472 35472
//   data 2, layers 2      loss 0.323301  parameter bytes per rank 35840 34592 35840 34592
//   data 2, channels 2    loss 0.323301  parameter bytes per rank 35472 35472 35472 35472
//   layers 2, channels 2  loss 0.323301  parameter bytes per rank 18048 18048 17424 17424
#include <lockstep/lockstep.hpp>
#include <lockstep/split.hpp>

#include <cstdio>
#include <iostream>

namespace {

using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

// A layer of your own with a short cut: x + down(relu(up(x))), x [n, width]. As one layer of a Sequential it can be
// split by data and by layers without more ado. Shardable is for splitting by channels.
struct Block : torch::nn::Module, lockstep::Shardable {
  Block(int64_t width, int64_t hidden)
      : up(register_module("up", Linear(width, hidden))), down(register_module("down", Linear(hidden, width))) {}
  Tensor forward(const Tensor& x) { return x + down(torch::relu(up(x))); }
  torch::nn::AnyModule shard(Rank& rank) const override;

  Linear up, down;
};

// Holds a rank's part of a Block: some of the hidden units. `down` adds up what the ranks' units contribute.
struct BlockOfRank : torch::nn::Module {
  BlockOfRank(const Block& whole, Rank& rank)
      : up(register_module("up", lockstep::ColumnParallelLinear(whole.up, rank))),
        down(register_module("down", lockstep::RowParallelLinear(whole.down, rank))) {}
  Tensor forward(const Tensor& x) { return x + down(torch::relu(up(x))); }

  lockstep::ColumnParallelLinear up;
  lockstep::RowParallelLinear down;
};

torch::nn::AnyModule Block::shard(Rank& rank) const {
  return torch::nn::AnyModule(std::make_shared<BlockOfRank>(*this, rank));
}

// The same weights on every rank and for every scheme. Layers have names, which errors and checkpoints use.
Sequential make_net(Rank& rank) {
  return rank.in_turn([] {
    torch::manual_seed(1);
    Sequential net;
    net->push_back("input", Linear(8, 32));
    net->push_back("relu", torch::nn::ReLU());
    net->push_back("block1", std::make_shared<Block>(32, 64));
    net->push_back("block2", std::make_shared<Block>(32, 64));
    net->push_back("output", Linear(32, 4));
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

// The loss of the trained network's output for the whole data, and the bytes of parameters that each rank holds.
void report(const char* scheme, Rank& rank, lockstep::Optimizer& sgd, const Tensor& output,
            const lockstep::Dataset& data) {
  Tensor bytes = torch::zeros(rank.world_size(), torch::kLong);
  for (const auto& parameter : sgd.param_groups()[0].params())
    bytes[rank.index()] += static_cast<int64_t>(parameter.nbytes());
  rank.allreduce(bytes);
  if (rank.index() != 0) return;
  std::printf("%-21s loss %.6f  parameter bytes per rank", scheme, F::cross_entropy(output, data.y).item<double>());
  for (int i = 0; i < rank.world_size(); ++i) std::printf(" %5ld", static_cast<long>(bytes[i].item<int64_t>()));
  std::printf("\n");
}

// The same loop for every scheme, which is the argument `split`. Batches are split along the mesh's data axis alone.
// The stages of a pipeline take a batch in microbatches, so that both can compute at once.
void train(const char* scheme, const lockstep::ModelSplit& split, Rank& rank, const lockstep::Dataset& data) {
  lockstep::SplitModel net(make_net(rank), rank, split);
  lockstep::Optimizer sgd(net, torch::optim::SGDOptions(/*lr=*/0.1).momentum(0.9));
  for (int epoch = 0; epoch < 10; ++epoch) {
    for (const auto& batch : lockstep::batches(data, {.size = 64, .epoch = epoch}, net.mesh().data())) {
      sgd.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      sgd.step();
    }
  }
  report(scheme, rank, sgd, net.forward(data.x), data);
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  const auto on = [&](const char* scheme, const lockstep::ModelSplit& split) {
    const lockstep::Devices devices(static_cast<size_t>(split.mesh.size()), torch::kCPU);
    lockstep::run(devices, [&](Rank& rank) { train(scheme, split, rank, data); });
  };
  on("one device", {});
  on("by data", {.mesh = {.data = 2}});
  on("by layers", {.mesh = {.pipeline = 2}, .microbatches = 4});
  on("by channels", {.mesh = {.tensor = 2}});
  on("data 2, layers 2", {.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2});
  on("data 2, channels 2", {.mesh = {.data = 2, .tensor = 2}});
  on("layers 2, channels 2", {.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2});
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
