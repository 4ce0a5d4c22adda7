// The plug-in that host.cpp loads: train() fits y = 3 x - 1 on two ranks.
#include <lockstep/base/error.hpp>
#include <lockstep/data/fetch_data.hpp>
#include <lockstep/lockstep.hpp>

struct LineImpl : torch::nn::Module {
  LineImpl() : fc(register_module("fc", torch::nn::Linear(1, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return fc(x); }
  torch::nn::Linear fc;
};
TORCH_MODULE(Line);

extern "C" double train() {  // the slope that it found
  double slope = 0;
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
    if (rank.index() == 0) slope = net->fc->weight.item<double>();
  });
  return slope;
}

extern "C" bool throws_an_error() try {  // an error of the component data, which the plug-in has too
  lockstep::fetch_fashion_mnist(".", {.base_urls = {"file:///nowhere"}});
  return false;
} catch (const lockstep::Error&) {
  return true;
}
