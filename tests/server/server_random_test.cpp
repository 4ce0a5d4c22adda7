// Labels: concurrency
// A parameter server and random numbers: its workers drop what one device drops, and a seed that a rank sets is warned
// of.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/server/parameter_server.hpp>

#include <memory>

#include "support/dropout_training.hpp"
#include "support/seed_warnings.hpp"

namespace lockstep {
namespace server_random_test {

using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

// The parameter counts the workers, beside whom there is a server.
using DropoutTrainingWorkers = DropoutTraining;
INSTANTIATE_TEST_SUITE_P(Sizes, DropoutTrainingWorkers, testing::Values(1, 2, 3));

TEST_P(DropoutTrainingWorkers, TrainAsOneDevice) {
  on_seeded_ranks(GetParam() + 1, [&](Rank& rank) {
    Sequential net = copy_of(start_);
    ParameterServer server(net, rank, [](const auto& slices) {
      return std::make_unique<torch::optim::SGD>(slices, torch::optim::SGDOptions(0.1).momentum(0.9));
    });
    server.train([&](Worker& worker) {
      for (auto& batch : batches(data_, batches_, worker)) {
        net->zero_grad();
        const auto scope = worker.samples(batch);
        const Tensor loss = batch.size() == 0 ? Tensor() : F::cross_entropy(net->forward(batch.x), batch.y);
        worker.backward(loss, batch);
        worker.step();
      }
    });
    expect_trained(net->named_parameters());
  });
}

TEST(ServerRandom, WarnsOfASeedInTheLoop) {
  expect_warned_of_a_seed_in_the_loop([](Rank& rank, const Sequential& net, const auto& before_step) {
    const auto make_sgd = [](const auto& slices) { return std::make_unique<torch::optim::SGD>(slices, 0.1); };
    ParameterServer server(net, rank, make_sgd);
    before_step();
    server.train([](Worker& worker) { worker.step(); });
  });
}

}  // namespace server_random_test
}  // namespace lockstep
