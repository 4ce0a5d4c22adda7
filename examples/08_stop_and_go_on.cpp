// Stop and go on: after every epoch the run keeps a checkpoint. Started again, with the same folder, the run goes on
// from the last one, after a Ctrl-C, a crash or its end; with as many ranks (threads, or two processes) with the bits
// of a run that never stopped.
//
// What a run goes on from is three things: the parameters and buffers, the optimizer's state, and how many epochs are
// done. The last decides the order of the samples too, which depends on seed and epoch alone. Rank 0 writes for all,
// and another number of ranks can go on. (A PowerSgdHook's errors() and queries() and a LocalSgd's momentum() are such
// state as well.)
//
// lockstep train keeps checkpoints by itself, also within an epoch, and has --resume.
//
//   example_08_stop_and_go_on FOLDER [epochs, default 6] [devices, default 2xcpu]
//
// Expected output of a first start with 3 epochs and a second one with 6, in double precision, so that the digits are
// the same on every machine:
//
//   epoch 1  loss 1.360823
//   epoch 2  loss 1.309888
//   epoch 3  loss 1.229925
//   going on after epoch 3
//   epoch 4  loss 1.099226
//   epoch 5  loss 0.914221
//   epoch 6  loss 0.715958
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>

namespace {

using lockstep::Rank;
using torch::Tensor;
using torch::nn::Linear;
namespace F = torch::nn::functional;
namespace fs = std::filesystem;

struct Net : torch::nn::Module {
  Net() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return output(torch::relu(hidden(x))); }

  Linear hidden = register_module("hidden", Linear(8, 64));
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

// A checkpoint is a folder, whose name says how many epochs are done.
fs::path checkpoint(const fs::path& folder, int epochs_done) {
  return folder / ("epoch-" + std::to_string(epochs_done));
}

// The folder gets its name when all files are written, so a run that is killed meanwhile leaves the checkpoint before.
// All ranks call save().
void save(const fs::path& to, lockstep::DataParallel<Net>& net, lockstep::Optimizer& sgd, const Rank& rank) {
  const fs::path unfinished = to.string() + ".unfinished";
  if (rank.index() == 0) fs::create_directories(unfinished);
  sgd.save(unfinished / "sgd.safetensors");  // rank 0 writes
  if (rank.index() != 0) return;
  lockstep::save_weights(unfinished / "net.safetensors", *net);  // Python's safetensors.torch.load_file reads it
  fs::rename(unfinished, to);
}

void train(Rank& rank, const lockstep::Dataset& data, const fs::path& folder, int epochs_done, int epochs) {
  const auto module = make_net(rank);
  const fs::path last = checkpoint(folder, epochs_done);
  if (epochs_done > 0) lockstep::load_weights(last / "net.safetensors", *module);
  lockstep::DataParallel net(module, rank);
  lockstep::Optimizer sgd(net, torch::optim::SGDOptions(/*lr=*/0.1).momentum(0.9));
  if (epochs_done > 0) sgd.load(last / "sgd.safetensors");

  const lockstep::Dataset whole = data.to(rank.device());
  for (int epoch = epochs_done; epoch < epochs; ++epoch) {
    for (auto& batch : lockstep::batches(whole, {.size = 64, .epoch = epoch}, rank)) {
      sgd.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      sgd.step();
    }
    save(checkpoint(folder, epoch + 1), net, sgd, rank);
    if (rank.index() != 0) continue;
    const double loss = F::cross_entropy(net(whole.x), whole.y).item<double>();
    std::printf("epoch %d  loss %.6f\n", epoch + 1, loss);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  lockstep::keep_freed_memory();
  if (argc < 2) {
    std::cerr << "usage: example_08_stop_and_go_on FOLDER [epochs] [devices]\n";
    return 2;
  }
  const fs::path folder = argv[1];
  const int epochs = argc > 2 ? std::atoi(argv[2]) : 6;
  const lockstep::Devices devices = lockstep::parse_devices(argc > 3 ? argv[3] : "2xcpu");

  int epochs_done = epochs;  // the last checkpoint's epochs
  while (epochs_done > 0 && !fs::exists(checkpoint(folder, epochs_done))) --epochs_done;
  if (epochs_done > 0) std::printf("going on after epoch %d\n", epochs_done);

  const lockstep::Dataset data = make_data();
  lockstep::run(devices, [&](Rank& rank) { train(rank, data, folder, epochs_done, epochs); });
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
