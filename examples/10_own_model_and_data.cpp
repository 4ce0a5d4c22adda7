// A model and data of your own, with all that `lockstep train` has: fit() trains on the devices, measures after every
// epoch, writes a report, and keeps checkpoints. Started again with the same folder, the program goes on to the same
// bits, after a Ctrl-C, a kill or its end. FOLDER/waves.csv, made if it is not there, has lines of four numbers and one
// to predict.
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
#include <lockstep/fit.hpp>
#include <lockstep/lab.hpp>
#include <lockstep/lockstep.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>

struct WaveNet : torch::nn::Module {
  WaveNet() { to(torch::kDouble); }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(hidden(x))).squeeze(1); }
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(4, 32));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(32, 1));
};

void make_file(const std::filesystem::path& path) {
  create_directories(path.parent_path());
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
  const std::string place = path.string() + ", line " + std::to_string(numbers.size() / 5 + 1);
  if (!file.eof() || numbers.empty() || numbers.size() % 5 != 0) throw lockstep::Error(place + ": not five numbers");
  const torch::Tensor table = torch::tensor(numbers, torch::kDouble).view({-1, 5});
  return {table.narrow(1, 0, 4), table.select(1, 4)};
}

int main(int argc, char** argv) try {
  if (argc < 2) throw lockstep::Error("give the folder of waves.csv, in which the run is kept too");
  const lockstep::StopOnSignals signals;  // Ctrl-C and SIGTERM end a run after a step, of which a checkpoint is kept
  const std::filesystem::path folder = argv[1];
  if (!exists(folder / "waves.csv")) make_file(folder / "waves.csv");
  const auto [x, y, more] = read_file(folder / "waves.csv");
  const lockstep::Task task{
      .name = "wave-net",
      .module = [] { return WaveNet(); },
      .criterion = torch::nn::functional::mse_loss,
      .train = {{x.slice(0, 0, 500), y.slice(0, 0, 500)}},
      .test = {{x.slice(0, 500), y.slice(0, 500)}},
      .metrics = {{.name = "mae", .of = [](auto& y_hat, auto& truth) { return (y_hat - truth).abs(); }}}};
  const lockstep::TrainOptions options{.devices = lockstep::parse_devices(argc > 3 ? argv[3] : "2xcpu"),
                                       .batch = {.size = 20},
                                       .optimizer = {.kind = lockstep::OptimizerKind::adam},
                                       .rate = {.lr = 0.01},
                                       .epochs = argc > 2 ? std::stoi(argv[2]) : 6,
                                       .keep = {.run_dir = folder / "run", .resume = "auto"}};
  const auto tell = [](const lockstep::EpochMetrics& now) {
    std::printf("epoch %d  loss %.6f  mae %.6f\n", now.epoch, now.test.at("loss"), now.test.at("mae"));
  };
  lockstep::fit(task, options, {.on_epoch = tell, .stop = signals.token()});
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
