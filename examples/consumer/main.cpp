// A user's own network, trained over two ranks: finds w = 3 and b = -1 in y = 3 x - 1.
// Expected output: "2 ranks: w = 3.00, b = -1.00"
#include <lockstep/lockstep.hpp>

#include <cstdio>

struct LineImpl : torch::nn::Module {
  LineImpl() : fc(register_module("fc", torch::nn::Linear(1, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return fc(x); }
  torch::nn::Linear fc;
};
TORCH_MODULE(Line);

int main() {
  const auto x = torch::linspace(-1, 1, 101).view({101, 1});
  const lockstep::Dataset points{x, 3 * x - 1};

  lockstep::run(lockstep::parse_devices("2xcpu"), [&](lockstep::Rank& rank) {
    lockstep::DataParallel net(Line(), rank);
    torch::optim::SGD sgd(net->parameters(), /*lr=*/0.5);
    for (int epoch = 0; epoch < 20; ++epoch) {
      for (auto& batch : lockstep::batches(points, {.size = 10, .epoch = epoch}, rank)) {
        sgd.zero_grad();
        net.loss(batch, torch::nn::functional::mse_loss).backward();
        sgd.step();
      }
    }
    if (rank.index() == 0) {
      std::printf("%d ranks: w = %.2f, b = %.2f\n", rank.world_size(), net->fc->weight.item<double>(),
                  net->fc->bias.item<double>());
    }
  });
}
