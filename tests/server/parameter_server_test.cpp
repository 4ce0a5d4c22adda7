// Labels: concurrency 3x3 2x4
// The parameter server: equal to DataParallel when synchronous, every push counted otherwise, and what happens when a
// worker or a server fails.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/ranks/traffic.hpp>
#include <lockstep/server/parameter_server.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/test_devices.hpp"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace parameter_server_test {

using lockstep::Consistency;
using lockstep::Error;
using lockstep::error_of;
using lockstep::error_on_ranks;
using lockstep::Fails;
using lockstep::LostWorker;
using lockstep::on_host;
using lockstep::ParameterServer;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Worker;
using testing::HasSubstr;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;
namespace F = torch::nn::functional;
using namespace std::chrono_literals;

struct Net : torch::nn::Module {
  Net() { to(torch::kFloat); }
  Linear hidden = register_module("hidden", Linear(6, 33));
  Linear output = register_module("output", Linear(33, 3));
  Tensor scale = register_parameter("scale", torch::ones({}));
  Tensor forward(const Tensor& x) { return output(torch::tanh(hidden(x))) * scale; }
};

std::shared_ptr<Net> make_net(Rank& rank) {
  return rank.in_turn([] {
    torch::manual_seed(1);
    return std::make_shared<Net>();
  });
}

// 23 samples in batches of 11 leave a last batch of one, of which all workers but one get nothing.
lockstep::Dataset make_task() {
  const Tensor x = torch::sin(torch::arange(23 * 6, torch::kFloat)).view({23, 6});
  return {x, torch::arange(23) % 3};
}

constexpr int kEpochs = 3;
lockstep::BatchOptions batches_of(int epoch) {
  return {.size = 11, .seed = 3, .epoch = epoch};
}

auto momentum_sgd() {
  return [](const std::vector<Tensor>& parameters) {
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.3).momentum(0.9).weight_decay(0.01));
  };
}

auto adam() {
  return [](const std::vector<Tensor>& parameters) {
    return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01));
  };
}

auto plain_sgd(double lr) {
  return [lr](const std::vector<Tensor>& parameters) { return std::make_unique<torch::optim::SGD>(parameters, lr); };
}

// One vector that begins at zeros, for pushes by hand.
struct Vector : torch::nn::Module {
  Tensor values = register_parameter("values", torch::zeros({5, 2}));
};

void push_ones(Vector& net, Worker& worker, double value = 1) {
  net.values.mutable_grad() = torch::full_like(net.values, value).detach();
  worker.step();
}

// The parameters after training on `workers` threads with DataParallel.
template <class MakeOptimizer>
std::vector<Tensor> trained_by_allreduce(int workers, const MakeOptimizer& make_optimizer) {
  std::vector<Tensor> parameters;
  lockstep::run(lockstep::test_devices(workers), [&](Rank& rank) {
    lockstep::DataParallel net(make_net(rank), rank);
    const auto optimizer = make_optimizer(net->parameters());
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      for (auto& batch : lockstep::batches(make_task(), batches_of(epoch), rank)) {
        optimizer->zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        optimizer->step();
      }
    }
    if (rank.index() == 0) parameters = net->parameters();
  });
  return parameters;
}

class ParameterServerWorlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ParameterServerWorlds, testing::Values(2, 3, 4, 5),
                         [](const auto& world) { return std::to_string(world.param) + "Ranks"; });

// Bit for bit, with parameters that are cut into slices. On GPUs DataParallel and the server add in other operators.
TEST_P(ParameterServerWorlds, SynchronousTrainingIsThatOfAllreduce) {
  const int world = GetParam();
  for (int servers = 1; servers <= std::min(2, world - 1); ++servers) {
    for (const bool with_adam : {false, true}) {
      const ParameterServer::MakeOptimizer make_optimizer =
          with_adam ? ParameterServer::MakeOptimizer(adam()) : ParameterServer::MakeOptimizer(momentum_sgd());
      lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
        const auto net = make_net(rank);
        ParameterServer server(net, rank, make_optimizer, {.servers = servers, .slice_bytes = 100});
        ASSERT_EQ(server.is_server(), rank.index() >= world - servers);
        ASSERT_EQ(server.optimizer() != nullptr, server.is_server());
        for (int epoch = 0; epoch < kEpochs; ++epoch) {
          const auto lost = server.train([&](Worker& worker) {
            for (auto& batch : lockstep::batches(make_task(), batches_of(epoch), worker)) {
              net->zero_grad();
              worker.backward(F::cross_entropy(net->forward(batch.x), batch.y), batch);
              worker.step();
            }
          });
          EXPECT_TRUE(lost.empty());
        }
        for (const auto& parameter : net->parameters()) {  // on the servers too
          const Tensor first = parameter.detach().clone();
          rank.broadcast(first);
          EXPECT_TRUE(first.equal(parameter.detach())) << "rank " << rank.index();
        }
        if (rank.index() != 0) return;
        const auto expected = trained_by_allreduce(world - servers, make_optimizer);
        const auto actual = net->parameters();
        for (size_t i = 0; i < expected.size(); ++i) {
          const bool same = rank.device().is_cpu() ? actual[i].equal(expected[i])
                                                   : torch::allclose(actual[i], expected[i], 0, /*atol=*/1e-6);
          EXPECT_TRUE(same) << "parameter " << i << ", " << servers << " servers, Adam " << with_adam << ", difference "
                            << (actual[i] - expected[i]).abs().max().item<double>();
        }
      });
    }
  }
}

struct WithUnusedLayers : torch::nn::Module {
  WithUnusedLayers() { to(torch::kDouble); }
  Linear used = register_module("used", Linear(6, 3));
  Linear once = register_module("once", Linear(6, 3));  // in the first batch of each epoch
  Linear never = register_module("never", Linear(6, 3));
  Tensor forward(const Tensor& x, bool first) { return first ? used(x) + once(x) : used(x); }
};

// A parameter that no worker used stays as it is; momentum and weight decay must not move it.
TEST_P(ParameterServerWorlds, AParameterThatNoWorkerUsedStaysAsOnOneDevice) {
  const auto adam_w = [](const std::vector<Tensor>& parameters) {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  };
  const auto make = [](Rank& rank) {
    return rank.in_turn([] {
      torch::manual_seed(2);
      return std::make_shared<WithUnusedLayers>();
    });
  };
  lockstep::Dataset task = make_task();
  task.x = task.x.to(torch::kDouble);
  lockstep::run(lockstep::test_devices(GetParam()), [&](Rank& rank) {
    const auto net = make(rank);
    ParameterServer server(net, rank, adam_w);
    server.train([&](Worker& worker) {
      for (int epoch = 0; epoch < kEpochs; ++epoch) {
        bool first = true;
        for (auto& batch : lockstep::batches(task, batches_of(epoch), worker)) {
          net->zero_grad();
          worker.backward(F::cross_entropy(net->forward(batch.x, first), batch.y), batch);
          worker.step();
          first = false;
        }
      }
    });
    const auto expected = make(rank);
    const auto optimizer = adam_w(expected->parameters());
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      bool first = true;
      for (auto& batch : lockstep::batches(task, batches_of(epoch))) {
        optimizer->zero_grad();
        F::cross_entropy(expected->forward(batch.x, first), batch.y).backward();
        optimizer->step();
        first = false;
      }
    }
    const auto parameters = net->named_parameters();
    for (const auto& item : expected->named_parameters()) {
      EXPECT_LT((on_host(parameters[item.key()]) - item.value().detach()).abs().max().item<double>(), 1e-10)
          << item.key();
    }
  });
}

// Sums of small whole numbers are exact in any order.
TEST_P(ParameterServerWorlds, WithoutSynchronyEveryPushIsAppliedOnce) {
  const int world = GetParam();
  for (const auto consistency : {Consistency::asynchronous, Consistency::bounded}) {
    lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
      const auto net = std::make_shared<Vector>();
      ParameterServer server(net, rank, plain_sgd(1), {.consistency = consistency, .staleness = 2, .slice_bytes = 16});
      const auto lost = server.train([&](Worker& worker) {
        for (int i = 0; i < 5 + worker.index(); ++i) push_ones(*net, worker, worker.index() + 1);
      });
      EXPECT_TRUE(lost.empty());
      double sum = 0;
      for (int worker = 0; worker < world - 1; ++worker) sum += (5 + worker) * (worker + 1);
      EXPECT_TRUE(on_host(net->values).equal(torch::full({5, 2}, -sum))) << net->values;
    });
  }
}

TEST_P(ParameterServerWorlds, WhatWorkersAndServersSendIsCounted) {
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    const auto traffic = std::make_shared<lockstep::Traffic>();
    Rank counted = lockstep::Traffic::observed(rank, traffic);
    const auto net = std::make_shared<Vector>();
    ParameterServer server(net, counted, plain_sgd(1), {.consistency = Consistency::asynchronous});
    traffic->sent = 0;
    EXPECT_TRUE(server.train([&](Worker& worker) { push_ones(*net, worker); }).empty());
    EXPECT_TRUE(on_host(net->values).equal(torch::full({5, 2}, 1.0 - world))) << net->values;
    const double values = 5 * 2 * sizeof(float);
    const int workers = world - 1;
    EXPECT_GE(traffic->sent, server.is_server() ? (workers + 1) * values : values);  // a reply each, and the end's
    EXPECT_LT(traffic->sent, (server.is_server() ? 2 * workers + 1 : 4) * values);
  });
}

TEST_P(ParameterServerWorlds, AWorkerThatFailsIsLostAndTheOthersGoOn) {
  const int world = GetParam();
  if (world < 3) GTEST_SKIP() << "one worker has no others";
  for (const auto consistency : {Consistency::asynchronous, Consistency::bounded}) {
    lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
      const auto net = std::make_shared<Vector>();
      ParameterServer server(net, rank, plain_sgd(1), {.consistency = consistency, .staleness = 1});
      const auto lost = server.train([&](Worker& worker) {
        for (int i = 0; i < 20; ++i) {
          if (worker.index() == 1 && i == 2) throw std::runtime_error("out of luck");
          push_ones(*net, worker);
        }
      });
      ASSERT_EQ(lost.size(), 1);
      EXPECT_EQ(lost[0].worker, 1);
      EXPECT_THAT(lost[0].reason, HasSubstr("out of luck"));
      EXPECT_TRUE(on_host(net->values).equal(torch::full({5, 2}, -20.0 * (world - 2) - 2))) << net->values;
      rank.barrier();  // the lost worker's rank is still one of them
      EXPECT_TRUE(server.train([&](Worker& worker) { push_ones(*net, worker); }).empty());
    });
  }
}

// An Embedding with sparse gradients, beside the same one on one device with dense ones.
TEST_P(ParameterServerWorlds, SparsePushesSendTheUsedRowsAlone) {
  const int world = GetParam();
  const auto make_embedding = [](Rank& rank, bool sparse) {
    return rank.in_turn([&] {
      torch::manual_seed(5);
      torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(1000, 8).sparse(sparse));
      embedding->to(torch::kDouble);
      return embedding;
    });
  };
  const lockstep::Dataset task{(torch::arange(24) * 37 % 100 * 10).view({12, 2}), torch::zeros(12)};
  const auto loss = [](torch::nn::Embedding& embedding, const Tensor& x) {
    return embedding(x).sin().square().sum({1, 2}).mean();
  };
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    auto embedding = make_embedding(rank, true);
    ParameterServer server(embedding, rank, plain_sgd(0.5),
                           {.slice_bytes = 370 * 64});  // rows 370 and 740 begin a slice
    server.train([&](Worker& worker) {
      for (auto& batch : lockstep::batches(task, {.size = 4, .seed = 1}, worker)) {
        embedding->zero_grad();
        worker.backward(batch.size() > 0 ? loss(embedding, batch.x) : Tensor(), batch);
        worker.step();
      }
      // Each sample has two rows: their numbers, and eight doubles each, with gaps of less than 16 bytes.
      EXPECT_LE(worker.bytes_pushed(), 12 * 2 * (8 + 8 * 8) + 3 * 4 * 2 * 16);
    });
    if (rank.index() != 0) return;
    std::vector<Tensor> expected;
    lockstep::run(lockstep::test_devices(1), [&](Rank& alone) {
      auto dense = make_embedding(alone, false);
      torch::optim::SGD sgd(dense->parameters(), 0.5);
      for (auto& batch : lockstep::batches(task, {.size = 4, .seed = 1}, alone)) {
        sgd.zero_grad();
        loss(dense, batch.x).backward();
        sgd.step();
      }
      expected = dense->parameters();
    });
    EXPECT_LT((embedding->weight - expected[0]).abs().max().item<double>(), 1e-12);
  });
}

TEST(ParameterServer, ABoundedWorkerIsAtMostSoManyStepsAhead) {
  constexpr int64_t kStaleness = 3;
  std::atomic<int64_t> ahead = 0, behind = 0;  // steps that the fast worker has finished, and the slow one begun
  lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
    const auto net = std::make_shared<Vector>();
    ParameterServer server(net, rank, plain_sgd(1), {.consistency = Consistency::bounded, .staleness = kStaleness});
    server.train([&](Worker& worker) {
      for (int64_t step = 0; step < 12; ++step) {
        if (worker.index() == 0) {
          push_ones(*net, worker);
          EXPECT_LE(++ahead, behind + kStaleness);
          continue;
        }
        // The fast worker gets as far as it may, and not further after any time.
        const auto deadline = std::chrono::steady_clock::now() + 20s;
        while (ahead < std::min<int64_t>(12, behind + kStaleness)) {
          ASSERT_LT(std::chrono::steady_clock::now(), deadline) << ahead << " of " << behind + kStaleness;
          std::this_thread::sleep_for(1ms);
        }
        std::this_thread::sleep_for(2ms);
        ++behind;
        push_ones(*net, worker);
      }
    });
  });
  EXPECT_EQ(ahead, 12);
}

TEST(ParameterServer, PushAndPullByThemselves) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    const auto net = std::make_shared<Vector>();
    ParameterServer server(net, rank, plain_sgd(1));
    server.train([&](Worker& worker) {
      net->values.mutable_grad() = torch::ones({5, 2});
      worker.push();
      worker.push();
      EXPECT_TRUE(net->values.equal(torch::zeros({5, 2})));
      worker.pull();
      EXPECT_TRUE(on_host(net->values).equal(torch::full({5, 2}, -2.0)));
    });
  });
}

TEST(ParameterServer, AFailureThatCannotBeBorneEndsTheRunAndNamesTheRank) {
  const auto error_of_training = [](Consistency consistency, const auto& make_optimizer, const auto& body) {
    return error_of([&] {
      lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
        const auto net = std::make_shared<Vector>();
        ParameterServer server(net, rank, make_optimizer, {.consistency = consistency});
        server.train([&](Worker& worker) { body(*net, worker); });
      });
    });
  };
  const auto forever = [](Vector& net, Worker& worker) {
    for (;;) push_ones(net, worker);
  };

  struct Failing : torch::optim::SGD {
    using SGD::SGD;
    Tensor step(LossClosure) override { throw std::runtime_error("the server is out of luck"); }
  };
  const auto failing = [](const std::vector<Tensor>& parameters) { return std::make_unique<Failing>(parameters, 1.0); };
  std::atomic<int> told = 0;
  const auto watches = [&](Vector& net, Worker& worker) {
    const auto error = error_of([&] { forever(net, worker); });
    told += testing::Matches(Fails(Error::user_code, {2}))(error);
    throw Error(error);
  };
  for (const auto consistency : {Consistency::synchronous, Consistency::asynchronous, Consistency::bounded}) {
    told = 0;
    EXPECT_THAT(error_of_training(consistency, failing, watches), Fails(Error::user_code, {2}));
    EXPECT_EQ(told, 2);
  }

  const auto throws = [&](Vector& net, Worker& worker) {
    if (worker.index() == 1) throw std::runtime_error("out of luck");
    forever(net, worker);
  };
  EXPECT_THAT(error_of_training(Consistency::synchronous, plain_sgd(1), throws), Fails(Error::user_code, {1}));
  const auto all_throw = [](Vector&, Worker& worker) { throw std::runtime_error("worker is out of luck"); };
  EXPECT_THAT(error_of_training(Consistency::asynchronous, plain_sgd(1), all_throw), Fails(Error::user_code));
  const auto unequal = [](Vector& net, Worker& worker) {
    for (int i = 0; i < 2 + worker.index(); ++i) push_ones(net, worker);
  };
  EXPECT_THAT(error_of_training(Consistency::synchronous, plain_sgd(1), unequal), Fails(Error::difference));
}

// The servers' parts would be left out.
TEST(ParameterServer, ABatchThatWasCutForAllRanksIsRefused) {
  const lockstep::Dataset task = make_task();
  const auto error = error_on_ranks(3, [&](Rank& rank) {
    auto net = make_net(rank);
    ParameterServer server(net, rank, plain_sgd(0.1));
    server.train([&](Worker& worker) {
      for (auto& batch : lockstep::batches(task, batches_of(0), rank)) {
        worker.backward(batch.size() > 0 ? F::cross_entropy(net->forward(batch.x), batch.y) : Tensor(), batch);
        worker.step();
      }
    });
  });
  EXPECT_THAT(error, Refused());
}

TEST(ParameterServer, ABatchWithAGrainIsRefused) {
  const auto error = error_on_ranks(2, [](Rank& rank) {
    const auto net = std::make_shared<Vector>();
    ParameterServer server(net, rank, plain_sgd(1));
    server.train([&](Worker& worker) {
      const lockstep::Dataset data{torch::ones({4, 2}), torch::ones({4})};
      const auto batch = *lockstep::batches(data, {.size = 4, .grain = 2}, worker).begin();
      worker.backward(net->values.sum(), batch);
    });
  });
  EXPECT_THAT(error, Refused());
}

TEST(ParameterServer, BadInputIsRefusedBeforeTheFirstStep) {
  const auto refusal = [](int world, const auto& options_of, const auto& net_of) {
    return error_of([&] {
      lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
        ParameterServer server(net_of(rank), rank, plain_sgd(1), options_of(rank));
        ADD_FAILURE() << "was not refused";
      });
    });
  };
  using Options = lockstep::ParameterServerOptions;
  const auto vector = [](Rank&) { return std::make_shared<Vector>(); };
  const auto equal = [](const Options& options) { return [options](Rank&) { return options; }; };
  EXPECT_THAT(refusal(1, equal({}), vector), Refused());
  EXPECT_THAT(refusal(2, equal({.servers = 0}), vector), Refused());
  EXPECT_THAT(refusal(2, equal({.staleness = -1}), vector), Refused());
  EXPECT_THAT(refusal(3, equal({.servers = 2}), vector), Refused());
  EXPECT_THAT(refusal(
                  2, [](Rank& rank) { return Options{.staleness = rank.index()}; }, vector),
              Fails(Error::difference));
  EXPECT_THAT(refusal(2, equal({}),
                      [](Rank& rank) {
                        Sequential net(Linear(2, 3 + rank.index()));
                        return net;
                      }),
              Fails(Error::difference));
  const std::shared_ptr<Vector> shared = std::make_shared<Vector>();
  EXPECT_THAT(refusal(2, equal({}), [&](Rank&) { return shared; }), Fails(Error::difference));
}

}  // namespace parameter_server_test
