// Labels: concurrency arithmetic
// A worker's loss: what backward() refuses, and a loss of 16 bits, which cannot hold the weight of a batch's part.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/server/parameter_server.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"
#include "support/unit_gradient.hpp"

#include <memory>

namespace worker_loss_test {

using lockstep::error_of;
using lockstep::on_host;
using lockstep::ParameterServer;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Worker;
using torch::Tensor;
using torch::nn::Linear;
namespace F = torch::nn::functional;

// DataParallel refuses this too. A sum over a number that the targets do not change is right, as is a whole batch.
TEST(WorkerLoss, OfAMeanOverSomeOfAPartsTargetsIsRefusedAndTheirSumIsRight) {
  torch::manual_seed(5);
  const Tensor x = torch::randn({10, 4}, torch::kDouble);
  Tensor y = torch::arange(10) % 3;
  y.index_put_({torch::tensor({0, 2, 3})}, -100);  // unequally many of each worker's
  Linear start(4, 3);
  start->to(torch::kDouble);
  const auto copy = [&] { return std::dynamic_pointer_cast<torch::nn::LinearImpl>(start->clone()); };
  enum class Way { mean, sum };
  const auto step_of = [&](torch::nn::LinearImpl& net, const lockstep::Batch& batch, Way way) {
    const Tensor y_hat = net.forward(batch.x);
    if (way == Way::mean) return F::cross_entropy(y_hat, batch.y);
    return F::cross_entropy(y_hat, batch.y, F::CrossEntropyFuncOptions().reduction(torch::kSum)) / batch.size();
  };
  const auto outcome = [&](int workers, Way way) {
    const auto one = copy();
    torch::optim::SGD sgd(one->parameters(), 0.5);
    step_of(*one, {x, y, 10}, way).backward();
    sgd.step();
    return error_of([&] {
      lockstep::run(lockstep::test_devices(workers + 1), [&](Rank& rank) {
        const auto net = copy();
        ParameterServer server(
            net, rank, [](const auto& parameters) { return std::make_unique<torch::optim::SGD>(parameters, 0.5); });
        server.train([&](Worker& worker) {
          for (auto& batch : lockstep::batches({x, y}, {.size = 10, .shuffle = false}, worker)) {
            worker.backward(step_of(*net, batch, way), batch);
            worker.step();
          }
        });
        EXPECT_TRUE(torch::allclose(on_host(net->weight), one->weight, 1e-12, 1e-14)) << workers << " workers";
      });
    });
  };
  EXPECT_EQ(outcome(1, Way::mean), "(no error)");
  EXPECT_EQ(outcome(1, Way::sum), "(no error)");
  for (const int workers : {2, 3}) {
    EXPECT_THAT(outcome(workers, Way::mean), Refused());
    EXPECT_EQ(outcome(workers, Way::sum), "(no error)");
  }
}

// Workers have other numbers of words, and one of three has none.
TEST(WorkerLoss, OfAMeanOverIsThatOfOneDevice) {
  torch::manual_seed(6);
  const Tensor x = torch::randn({9, 4}, torch::kDouble), y = torch::tensor({9, 9, 9, 0, 1, 9, 2, 2, 1});
  const auto options = F::CrossEntropyFuncOptions().ignore_index(9);
  Linear one(4, 3);
  one->to(torch::kDouble);
  const auto start = one->clone();
  torch::optim::SGD sgd(one->parameters(), 0.5);
  for (int step = 0; step < 4; ++step) {
    sgd.zero_grad();
    F::cross_entropy(one(x), y, options).backward();
    sgd.step();
  }
  const auto train = [&](int workers, lockstep::Consistency consistency) {
    return error_of([&] {
      lockstep::run(lockstep::test_devices(workers + 1), [&](Rank& rank) {
        const auto net = std::dynamic_pointer_cast<torch::nn::LinearImpl>(start->clone());
        ParameterServer server(
            net, rank, [](const auto& parameters) { return std::make_unique<torch::optim::SGD>(parameters, 0.5); },
            {.consistency = consistency});
        server.train([&](Worker& worker) {
          for (int step = 0; step < 4; ++step) {
            for (auto& batch : lockstep::batches({x, y}, {.size = 9, .shuffle = false}, worker)) {
              net->zero_grad();
              worker.backward(net->forward(batch.x), lockstep::Criterion(F::cross_entropy, options), batch);
              worker.step();
            }
          }
        });
        EXPECT_TRUE(torch::allclose(on_host(net->weight), one->weight, 1e-12, 1e-14)) << workers << " workers";
      });
    });
  };
  for (const int workers : {1, 2, 3}) EXPECT_EQ(train(workers, lockstep::Consistency::synchronous), "(no error)");
  EXPECT_THAT(train(2, lockstep::Consistency::asynchronous), lockstep::Fails(lockstep::Error::user_code));
}

TEST(WorkerLoss, OfLowPrecisionHasTheGradientsOfAnyOther) {
  lockstep::run(lockstep::test_devices(3), [](Rank& rank) {
    const auto net = std::make_shared<lockstep::UnitGradient>();
    ParameterServer server(net, rank,
                           [](const auto& parameters) { return std::make_unique<torch::optim::SGD>(parameters, 1.0); });
    server.train([&](Worker& worker) {
      for (auto& batch : lockstep::batches(lockstep::ones_of(3), {.size = 3}, worker)) {
        worker.backward(net->forward(batch.x).mean().to(torch::kBFloat16), batch);
        worker.step();
      }
    });
    EXPECT_NEAR(net->w.item<double>(), -1, 1e-14);
  });
}

}  // namespace worker_loss_test
