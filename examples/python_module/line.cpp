// The Python module line: train("2xcpu") fits y = 3 x - 1 over two ranks, and returns the loss of each epoch.
#include <pybind11/stl.h>
#include <lockstep/lockstep.hpp>

std::vector<double> train(const std::string& devices, int epochs) {
  std::vector<double> losses(epochs);
  const auto x = torch::linspace(-1, 1, 100).view({100, 1});
  const lockstep::Dataset points{x, 3 * x - 1};
  lockstep::run(lockstep::parse_devices(devices), [&](lockstep::Rank& rank) {
    lockstep::DataParallel net(torch::nn::Linear(1, 1), rank);
    torch::optim::SGD sgd(net->parameters(), /*lr=*/0.5);
    for (int epoch = 0; epoch < epochs; ++epoch) {
      for (auto& batch : lockstep::batches(points, {.size = 100, .epoch = epoch}, rank)) {
        sgd.zero_grad();
        auto loss = net.loss(batch, torch::nn::functional::mse_loss);
        loss.backward();
        sgd.step();
        const double whole = loss.global_item();  // all ranks ask for it
        if (rank.index() == 0) losses[epoch] = whole;
      }
    }
  });
  return losses;
}

PYBIND11_MODULE(line, module) {
  namespace py = pybind11;
  module.def("train", train, py::arg("devices"), py::arg("epochs") = 10,
             py::call_guard<py::gil_scoped_release>());  // Python's other threads go on
}
