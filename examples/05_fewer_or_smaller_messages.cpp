// Fewer or smaller messages: between machines, or between GPUs without a fast link, a step may wait longer for the
// gradients of the others than it computes. Then send less.
//
//   a hook of your own  says how a bucket of gradients is averaged; here by votes on the signs, a byte per value.
//   bf16, PowerSGD      hooks that are there: 16 bits per value; two thin matrices in place of a layer's gradient.
//   local SGD, DiLoCo   nothing for several steps, and then the parameters' mean; DiLoCo takes momentum from it too.
//
// lockstep train has --compress bf16, fp16, powersgd and --sync-every; what they do to LeNet:
// docs/results/2026-11-22-exercises.md.
//
//   example_05_fewer_or_smaller_messages
//
// Expected output, in double precision, with CPU ranks, also where there are GPUs. Bytes are those that a rank sends,
// 56 of them in the report that goes with averaged gradients; a value has 8 here. The losses of the first line and of
// local SGD have the same digits on every machine. The others differ from one kind of processor to another, PowerSGD's
// and DiLoCo's by up to a quarter: signs, roundings and directions turn at values that processors round differently.
//
//   as they are                 40112 bytes per step  loss 0.126579
//   signs, the hook above        5140 bytes per step  loss 0.152297
//   bf16                        10136 bytes per step  loss 0.128621
//   PowerSGD of rank 2           5488 bytes per step  loss 0.100861
//   local SGD, every 5th step    7994 bytes per step  loss 0.118996
//   DiLoCo, every 5th step       7997 bytes per step  loss 0.057738
#include <lockstep/lab.hpp>
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <functional>
#include <iostream>

namespace {

using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
namespace F = torch::nn::functional;

constexpr int kEpochs = 30;

// signSGD with majority vote (Bernstein et al. 2018): the ranks' signs are added up, and the sum's sign is the
// gradient.
struct SignHook : lockstep::CommunicationHook {
  lockstep::CommunicationHook::Round average(const lockstep::GradientBucket& bucket, Rank& rank) override {
    const Tensor votes = bucket.flat.sign().to(torch::kChar);
    const auto finish = [flat = bucket.flat, votes] { flat.copy_(votes.sign()); };
    return {.work = lockstep::CommunicationHook::post_allreduce(rank, votes),
            .finish = finish};  // posted, not waited for
  }
};

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
  const Tensor x = torch::rand({640, 8}, torch::kDouble) * 2 - 1;
  const auto positive = [&](int i, int j) { return (x.select(1, i) * x.select(1, j) > 0).to(torch::kLong); };
  return {x, positive(0, 1) + 2 * positive(2, 3)};
}

// Trains a net that talks through `counted`, and prints what a step of the last epoch sent. `after_step`: LocalSgd's.
void train(
    const char* what, double lr, lockstep::DataParallel<Net>& net, Rank& counted, lockstep::Traffic& traffic,
    const lockstep::Dataset& data, const std::function<void()>& after_step = [] {}) {
  torch::optim::SGD sgd(net->parameters(), lr);
  int steps = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    steps = 0;
    traffic.sent = 0;
    for (auto& batch : lockstep::batches(data, {.size = 64, .epoch = epoch}, counted)) {
      sgd.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      sgd.step();
      after_step();
      ++steps;
    }
  }
  if (counted.index() != 0) return;
  const double loss = F::cross_entropy(net(data.x), data.y).item<double>();
  std::printf("%-26s  %5.0f bytes per step  loss %.6f\n", what, traffic.sent / steps, loss);
}

// A hook is one rank's: each makes its own.
void with_hook(const char* what, double lr, std::shared_ptr<lockstep::CommunicationHook> hook, Rank& rank,
               const lockstep::Dataset& data) {
  const auto traffic = std::make_shared<lockstep::Traffic>();
  Rank counted = lockstep::Traffic::observed(rank, traffic);
  lockstep::DataParallel net(make_net(rank), counted, {.hook = std::move(hook)});
  train(what, lr, net, counted, *traffic, data);
}

// Each rank steps alone, with the gradients of its own part; local.step() averages the parameters now and then.
void with_local_sgd(const char* what, const lockstep::LocalSgdOptions& options, Rank& rank,
                    const lockstep::Dataset& data) {
  const auto traffic = std::make_shared<lockstep::Traffic>();
  Rank counted = lockstep::Traffic::observed(rank, traffic);
  lockstep::DataParallel net(make_net(rank), counted, {.average = false});
  lockstep::LocalSgd local(net->parameters(), counted, options);
  train(what, /*lr=*/0.5, net, counted, *traffic, data, [&] { local.step(); });
}

void train_all(Rank& rank, const lockstep::Dataset& data) {
  with_hook("as they are", 0.5, nullptr, rank, data);
  with_hook("signs, the hook above", 0.003, std::make_shared<SignHook>(), rank, data);
  with_hook("bf16", 0.5, std::make_shared<lockstep::HalfPrecisionHook>(torch::kBFloat16), rank, data);
  const lockstep::PowerSgdOptions rank_2{.rank = 2};
  with_hook("PowerSGD of rank 2", 0.5, std::make_shared<lockstep::PowerSgdHook>(rank_2), rank, data);
  with_local_sgd("local SGD, every 5th step", {.sync_every = 5}, rank, data);
  with_local_sgd("DiLoCo, every 5th step", {.sync_every = 5, .outer_lr = 0.7, .outer_momentum = 0.9}, rank, data);
}

}  // namespace

int main() try {
  lockstep::keep_freed_memory();
  const lockstep::Dataset data = make_data();
  lockstep::run(lockstep::Devices(2, torch::kCPU), [&](Rank& rank) { train_all(rank, data); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
