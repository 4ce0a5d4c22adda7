#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/models/weights.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/ranks/rank.hpp>

#include "scenarios.hpp"
#include "support/random_training.hpp"

#include <fstream>
#include <sstream>
#include <string>

// Batches that split unevenly, and a last one that is smaller than the number of ranks.
void scenarios::training(const Setup& setup) {
  const auto data = lockstep::synthetic_images(97, 10);
  lockstep::run(setup.devices, [&](lockstep::Rank& rank) {
    lockstep::DataParallel net(lockstep::LeNet(3), rank);
    torch::optim::SGD sgd(net->parameters(), /*lr=*/0.1);
    for (int epoch = 1; epoch <= 2; ++epoch) {
      for (auto& batch : lockstep::batches(data.train, {.size = 32, .seed = 0, .epoch = epoch}, rank)) {
        sgd.zero_grad();
        net.loss(batch, torch::nn::functional::cross_entropy).backward();
        sgd.step();
      }
    }
    const auto score = lockstep::evaluate([&](auto& x) { return net(x); }, data.test, rank);
    if (score.total != 10) throw std::runtime_error("the evaluation has not seen every sample once");
    if (rank.index() == rank.world_size() - 1) lockstep::save_weights(setup.argument, *net);
  });
}

void scenarios::random_nets(const Setup& setup) {
  std::istringstream words(setup.argument);
  lockstep::ModelSplit split;
  char by = 0;
  std::string file;
  words >> split.mesh.data >> by >> split.mesh.pipeline >> file;
  const auto bits = lockstep::bits_of_random_nets(setup.devices, split);
  if (!bits.empty()) std::ofstream(file) << bits;
}
