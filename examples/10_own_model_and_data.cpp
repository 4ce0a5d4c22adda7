// A model and data of your own, with all that `lockstep train` has: fit() trains on the devices, measures after every
// epoch, draws the curve, and keeps checkpoints. Started again with the same folder, it goes on from the last one,
// after a Ctrl-C, a crash or its end, to the same bits. FOLDER/waves.csv has a line per sample: four numbers, and the
// one to be predicted. If it is not there, it is made.
//
//   example_10_own_model_and_data FOLDER [epochs, default 6] [devices, default 2xcpu]
//
// Expected output of a first start with 3 epochs and a second one with 6, in double precision, so that the digits are
// the same on every machine:
//
//   epoch 1  loss 0.439979  mae 0.583017
//   epoch 2  loss 0.428260  mae 0.583708
//   epoch 3  loss 0.415009  mae 0.567538
//   epoch 4  loss 0.397155  mae 0.549584
//   epoch 5  loss 0.360174  mae 0.522054
//   epoch 6  loss 0.312397  mae 0.479627
#include <lockstep/lockstep.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>

struct WaveNet : torch::nn::Module {
  WaveNet() { to(torch::kDouble); }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(hidden(x))).squeeze(1); }

  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(4, 32));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(32, 1));
};

void make_file(const std::filesystem::path& path) {
  std::ofstream file(path);
  for (int line = 0; line < 600; ++line) {
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
      const double value = line * (7 + 4 * i) % 101 / 50.0 - 1;
      file << value << ',';
      sum += value;
    }
    file << std::sin(2 * sum) << '\n';
  }
}

lockstep::Dataset read_file(const std::filesystem::path& path) {
  std::vector<double> numbers;
  std::ifstream file(path);
  for (double number; file >> number; file.get()) numbers.push_back(number);  // get(): the comma, or the line's end
  const torch::Tensor table = torch::tensor(numbers, torch::kDouble).view({-1, 5});
  return {table.narrow(1, 0, 4), table.select(1, 4)};
}

int main(int argc, char** argv) try {
  const std::filesystem::path folder = argc > 1 ? argv[1] : ".", run = folder / "run";
  if (!exists(folder / "waves.csv")) make_file(folder / "waves.csv");
  const auto [x, y, more] = read_file(folder / "waves.csv");
  const lockstep::Task task{
      .name = "wave-net",
      .module = [] { return WaveNet(); },
      .criterion = torch::nn::functional::mse_loss,
      .train = {{x.slice(0, 0, 500), y.slice(0, 0, 500)}},
      .test = {{x.slice(0, 500), y.slice(0, 500)}},
      .metrics = {{.name = "mae", .of = [](auto& y_hat, auto& truth) { return (y_hat - truth).abs(); }}}};
  lockstep::TrainOptions options{.devices = lockstep::parse_devices(argc > 3 ? argv[3] : "2xcpu"),
                                 .batch = {.size = 20},
                                 .optimizer = {.kind = lockstep::OptimizerKind::adam},
                                 .rate = {.lr = 0.01},
                                 .epochs = argc > 2 ? std::atoi(argv[2]) : 6,
                                 .keep = {.run_dir = run}};
  if (exists(run / "checkpoints")) options.keep.resume = run;
  lockstep::fit(task, options, {.on_epoch = [](const lockstep::EpochMetrics& now) {
                  std::printf("epoch %d  loss %.6f  mae %.6f\n", now.epoch, now.test.at("loss"), now.test.at("mae"));
                }});
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
