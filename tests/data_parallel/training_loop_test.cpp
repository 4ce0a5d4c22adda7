// Mistakes in a training loop that no single call shows: networks that drift apart are refused, and what may be meant
// is a warning.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/dropout.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace training_loop_test {

using lockstep::DataParallel;
using lockstep::Error;
using lockstep::Fails;
using lockstep::Rank;
using lockstep::Refused;
using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;
namespace F = torch::nn::functional;

const lockstep::Dataset data{torch::rand({12, 6}), torch::arange(12) % 3};

struct Outcome {
  std::vector<lockstep::Caught> errors;  // errors of each rank
  std::vector<std::string> warnings;     // warnings of all
};

Outcome outcome_of(int world, const std::function<void(Rank&)>& body) {
  Outcome outcome;
  outcome.errors.resize(static_cast<size_t>(world));
  lockstep::run(
      lockstep::test_devices(static_cast<size_t>(world)),
      [&](Rank& rank) { outcome.errors[static_cast<size_t>(rank.index())] = lockstep::error_of([&] { body(rank); }); },
      {.on_warning = [&](const std::string& text) { outcome.warnings.push_back(text); }});
  return outcome;
}

std::vector<std::string> warnings_of(int world, const std::function<void(Rank&)>& body) {
  const Outcome outcome = outcome_of(world, body);
  EXPECT_THAT(outcome.errors, Each("(no error)"));
  return outcome.warnings;
}

TEST(TrainingLoop, StepsWithoutTheNetsForwardOrBackwardAreRefusedAtTheSecondOne) {
  for (const bool sharded : {false, true}) {
    const Outcome outcome = outcome_of(2, [&](Rank& rank) {
      torch::nn::Linear module(6, 3);
      DataParallel net(module, rank, {.sharded = sharded ? lockstep::Sharded::state : lockstep::Sharded::nothing});
      torch::optim::SGD sgd(module->parameters(), 0.1);
      int steps = 0;
      for (auto& batch : lockstep::batches(data, {.size = 4}, rank)) {
        EXPECT_LT(++steps, 3);
        sgd.zero_grad();
        F::cross_entropy(module->forward(batch.x), batch.y).backward();
        sgd.step();
      }
    });
    EXPECT_THAT(outcome.errors, Each(Refused()));
  }
}

// Several backwards of another net's loss through this one, as of a generator that makes more steps than its critic.
TEST(TrainingLoop, BackwardsBetweenTwoStepsAreNone) {
  const Outcome outcome = outcome_of(2, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank), critic(torch::nn::Linear(3, 1), rank);
    torch::optim::SGD sgd(net->parameters(), 0.1), of_critic(critic->parameters(), 0.1);
    for (auto& batch : lockstep::batches(data, {.size = 4}, rank)) {
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        net.mean(critic->forward(net->forward(batch.x)).mean(), batch.size(), batch.global_size).backward();
        sgd.step();
      }
      of_critic.zero_grad();
      critic.mean(critic->forward(net->forward(batch.x).detach()).mean(), batch.size(), batch.global_size).backward();
      of_critic.step();
    }
  });
  EXPECT_THAT(outcome.errors, Each("(no error)"));
  EXPECT_THAT(outcome.warnings, IsEmpty());
}

void train(
    DataParallel<torch::nn::SequentialImpl>& net, Rank& rank, torch::optim::SGD& sgd,
    const std::function<void(const lockstep::Loss&)>& look = [](const auto&) {}, int64_t first_epoch = 0) {
  for (int64_t epoch = first_epoch; epoch < first_epoch + 4; ++epoch) {
    for (auto& batch : lockstep::batches(data, {.size = 4, .epoch = epoch}, rank)) {
      sgd.zero_grad();
      lockstep::Loss loss = net.loss(batch, F::cross_entropy);
      loss.backward();
      look(loss);
      sgd.step();
    }
  }
}

torch::nn::Sequential two_layers() {
  return torch::nn::Sequential(torch::nn::Linear(6, 40), torch::nn::ReLU(), torch::nn::Linear(40, 3));
}

TEST(TrainingLoop, NetworksThatDriftApartAreRefusedOnAllRanks) {
  for (const std::string what : {"weights", "rate", "frozen"}) {
    const Outcome outcome = outcome_of(3, [&](Rank& rank) {
      DataParallel net(two_layers(), rank);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      if (rank.index() == 1) {
        const torch::NoGradGuard no_grad;
        if (what == "weights") net->parameters()[0].mul_(2);
        if (what == "frozen") net->parameters()[0].requires_grad_(false);
      }
      train(net, rank, sgd, [&](const lockstep::Loss& loss) {
        auto& options = static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options());
        if (what == "rate") options.lr(0.1 * loss.item());
      });
    });
    EXPECT_THAT(outcome.errors, Each(Fails(Error::difference))) << what;
    if (what == "frozen") {
      EXPECT_THAT(outcome.errors, Each(Fails(Error::difference, {0, 1})));
    }
  }
}

TEST(TrainingLoop, EqualNetworksMayBeAnything) {
  const Outcome outcome = outcome_of(2, [](Rank& rank) {
    DataParallel net(two_layers(), rank);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    train(net, rank, sgd);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(std::nan(""));
    net->parameters()[0].requires_grad_(false);
    const torch::AutoGradMode with_grad(true);
    train(
        net, rank, sgd, [](const auto&) {}, 4);
  });
  EXPECT_THAT(outcome.errors, Each("(no error)"));
  EXPECT_THAT(outcome.warnings, IsEmpty());
}

TEST(TrainingLoop, AnEpochInTheSameOrderIsAWarning) {
  const auto epochs = [](const std::function<lockstep::BatchOptions(int64_t)>& options) {
    return warnings_of(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(6, 3), rank);
      for (int64_t epoch = 0; epoch < 3; ++epoch) {
        for (auto& batch : lockstep::batches(data, options(epoch), rank)) {
          const auto parts = batch.in_parts(2);
          {
            const auto guard = net.no_sync();
            net.loss(parts.at(0), F::cross_entropy).backward();
          }
          net.loss(parts.at(1), F::cross_entropy).backward();
        }
      }
    });
  };
  EXPECT_THAT(epochs([](int64_t) { return lockstep::BatchOptions{.size = 4}; }),
              ElementsAre(AllOf(HasSubstr("rank 0"), HasSubstr("the same order as before"),
                                HasSubstr("Set BatchOptions::epoch"))));
  EXPECT_THAT(epochs([](int64_t epoch) { return lockstep::BatchOptions{.size = 4, .epoch = epoch}; }), IsEmpty());
  EXPECT_THAT(epochs([](int64_t) { return lockstep::BatchOptions{.size = 4, .shuffle = false}; }), IsEmpty());
  EXPECT_THAT(epochs([](int64_t) { return lockstep::BatchOptions{.size = 12}; }), IsEmpty());  // all data at once
}

TEST(TrainingLoop, ABackwardInEvalModeIsAWarning) {
  const auto warnings = [](auto layer) {
    return warnings_of(2, [&](Rank& rank) {
      torch::nn::Sequential model(torch::nn::Linear(6, 3));
      model->push_back("layer", layer());
      DataParallel net(model, rank);
      for (auto& batch : lockstep::batches(data, {.size = 4}, rank)) {
        net.loss(batch, F::cross_entropy).backward();
        net->eval();
        net(batch.x);
      }
    });
  };
  EXPECT_THAT(warnings([] { return torch::nn::BatchNorm1d(3); }),
              ElementsAre(AllOf(HasSubstr("in eval() mode, so that layer acts"), HasSubstr("Call net.train()"))));
  EXPECT_THAT(warnings([] { return lockstep::Dropout(0.5); }), ElementsAre(HasSubstr("in eval() mode")));
  EXPECT_THAT(warnings([] { return torch::nn::ReLU(); }), IsEmpty());
}

struct ScaledImpl : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(6, 3));
  Tensor scale = torch::ones({1}, torch::requires_grad());
  Tensor forward(const Tensor& x) { return layer(x) * scale.to(x.device()); }
};
TORCH_MODULE(Scaled);

TEST(TrainingLoop, ALearnableTensorOutsideOfTheNetIsAWarning) {
  for (const int64_t grain : {0, 2}) {
    const auto warnings = warnings_of(2, [&](Rank& rank) {
      DataParallel net(Scaled(), rank);
      for (auto& batch : lockstep::batches(data, {.size = 4, .grain = grain}, rank))
        net.loss(batch, F::cross_entropy).backward();
    });
    EXPECT_THAT(warnings, ElementsAre(AllOf(HasSubstr("a tensor of shape [1]"), HasSubstr("register_parameter()"))));
  }
}

TEST(TrainingLoop, GradientsOfInputsAndOfOtherNetsAreWanted) {
  const auto warnings = warnings_of(2, [](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank), other(torch::nn::Linear(3, 3), rank);
    for (auto& batch : lockstep::batches(data, {.size = 4}, rank)) {
      batch.x.requires_grad_();
      net.mean(F::cross_entropy(other(net(batch.x)), batch.y), batch.size(), batch.global_size).backward();
    }
  });
  EXPECT_THAT(warnings, IsEmpty());
}

TEST(TrainingLoop, AGrainThatDrawsFromTheSharedGeneratorIsAWarning) {
  const auto warnings = [](const std::function<Tensor(const Tensor&)>& layer) {
    return warnings_of(2, [&](Rank& rank) {
      torch::nn::Sequential model(torch::nn::Linear(6, 3), torch::nn::Functional(layer), lockstep::Dropout(0.5));
      DataParallel net(model, rank);
      for (auto& batch : lockstep::batches(data, {.size = 4, .grain = 2}, rank))
        net.loss(batch, F::cross_entropy).backward();
    });
  };
  EXPECT_THAT(warnings([](const Tensor& x) { return torch::dropout(x, 0.5, true); }),
              ElementsAre(AllOf(HasSubstr("drew from LibTorch's default generator"), HasSubstr("lockstep::Dropout"))));
  EXPECT_THAT(warnings([](const Tensor& x) { return torch::relu(x); }), IsEmpty());
}

// Adds to one buffer in each forward, and fills another one in the first.
struct CentringImpl : torch::nn::Module {
  explicit CentringImpl(bool moves) : moves(moves) {}
  Tensor forward(const Tensor& x) {
    const torch::NoGradGuard no_grad;
    if (cache.sum().item<float>() == 0) cache.fill_(1);
    if (moves) centre.mul_(0.9).add_(x.mean(0), 0.1);
    return x - centre;
  }
  bool moves;
  Tensor centre = register_buffer("centre", torch::zeros({6})), cache = register_buffer("cache", torch::zeros({2}));
};
TORCH_MODULE(Centring);

TEST(TrainingLoop, ABufferThatGrainsChangeIsAWarning) {
  const auto warnings = [](bool moves, int64_t grain) {
    return warnings_of(2, [=](Rank& rank) {
      DataParallel net(torch::nn::Sequential(Centring(moves), torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 3)),
                       rank);
      for (auto& batch : lockstep::batches(data, {.size = 4, .grain = grain}, rank))
        net.loss(batch, F::cross_entropy).backward();
    });
  };
  EXPECT_THAT(warnings(true, 2),
              ElementsAre(AllOf(HasSubstr("the buffer 0.centre changed"), HasSubstr("between the steps"))));
  EXPECT_THAT(warnings(false, 2), IsEmpty());
  EXPECT_THAT(warnings(true, 0), IsEmpty());
}

// Rank by rank there are as many samples, so the sizes tell nothing.
TEST(TrainingLoop, DataOfARanksOwnAreRefused) {
  for (const bool shuffle : {true, false}) {
    const auto train_on = [&](const std::function<lockstep::Dataset(int)>& data_of) {
      return outcome_of(2, [&](Rank& rank) {
        DataParallel net(torch::nn::Linear(6, 3), rank);
        for (auto& batch : lockstep::batches(data_of(rank.index()), {.size = 4, .shuffle = shuffle}, rank)) {
          net.loss(batch, F::cross_entropy).backward();
        }
      });
    };
    const auto half = [](int rank) {
      const Tensor y = torch::tensor({0, 1, 2, 0, 1, 2, 2, 2, 1, 1, 0, 0}, torch::kLong);
      return lockstep::Dataset{data.x.slice(0, 6 * rank, 6 * rank + 6), y.slice(0, 6 * rank, 6 * rank + 6)};
    };
    EXPECT_THAT(train_on([&](int rank) { return half(rank); }).errors, Each(Fails(Error::difference)));
    EXPECT_THAT(train_on([&](int) { return half(0); }).errors, Each("(no error)"));
  }
}

// No hook tells of such gradients, and no backward compares the networks.
TEST(TrainingLoop, StepsThatNoBackwardLeadsToAreAWarning) {
  const auto train_with = [](int world, const lockstep::DataParallelOptions& options, bool by_hand) {
    return warnings_of(world, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(6, 3), rank, options);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        for (auto& batch : lockstep::batches(data, {.size = 4, .epoch = epoch}, rank)) {
          const Tensor loss = F::cross_entropy(net(batch.x), batch.y);
          if (by_hand) {
            net->bias.mutable_grad() = loss.detach() * torch::ones_like(net->bias);
          } else {
            const auto gradients = torch::autograd::grad({loss}, {net->weight, net->bias});
            net->weight.mutable_grad() = gradients[0];
            net->bias.mutable_grad() = gradients[1];
          }
          sgd.step();
        }
      }
    });
  };
  for (const bool by_hand : {false, true}) {
    EXPECT_THAT(train_with(2, {}, by_hand),
                ElementsAre(AllOf(HasSubstr("no backward was ever averaged"), HasSubstr("torch::autograd::grad()"),
                                  HasSubstr("net.loss(batch, criterion).backward()"), HasSubstr("average = false"))));
    EXPECT_THAT(train_with(2, {.average = false}, by_hand), IsEmpty());
    EXPECT_THAT(train_with(1, {}, by_hand), IsEmpty());
  }
}

// After an averaged backward the next one compares the networks. Before it, what was set by hand is averaged too.
TEST(TrainingLoop, GradientsSetByHandBesideABackwardAreRefusedOrAveraged) {
  const auto train = [](bool after) {
    return outcome_of(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(6, 3), rank);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      const auto set = [&] {
        net->weight.mutable_grad() = torch::full_like(net->weight, rank.index());
        net->bias.mutable_grad() = torch::full_like(net->bias, rank.index());
      };
      for (auto& batch : lockstep::batches(data, {.size = 4}, rank)) {
        sgd.zero_grad();
        if (!after) set();
        net.loss(batch, F::cross_entropy).backward();
        if (after) set();
        sgd.step();
      }
      Tensor mine = net->weight.detach().clone();
      rank.broadcast(mine);
      EXPECT_TRUE(after || mine.equal(net->weight));
    });
  };
  EXPECT_THAT(train(true).errors, Each(Fails(Error::difference)));
  EXPECT_THAT(train(false).errors, Each("(no error)"));
}

TEST(TrainingLoop, CollectivesOnTensorsWithAGraphAreAWarning) {
  const auto warnings = [](const std::function<void(Rank&, Tensor)>& call) {
    return warnings_of(2, [&](Rank& rank) {
      const Tensor w = torch::ones({2, 2}, torch::TensorOptions(rank.device()).requires_grad(true));
      call(rank, w);
    });
  };
  const auto of_graph = [](const std::string& call) {
    return ElementsAre(AllOf(HasSubstr(call + "() of a tensor with a graph"), HasSubstr("allreduce_with_gradient()")));
  };
  EXPECT_THAT(warnings([](Rank& rank, const Tensor& w) { rank.allreduce(w * w); }), of_graph("allreduce"));
  EXPECT_THAT(warnings([](Rank& rank, const Tensor& w) { rank.allgather(w * w); }), of_graph("allgather"));
  EXPECT_THAT(warnings([](Rank& rank, const Tensor& w) { rank.reduce_scatter(w * w); }), of_graph("reduce_scatter"));
  EXPECT_THAT(warnings([](Rank& rank, const Tensor& w) {
                rank.allgather(w);
                rank.allreduce((w * w).detach());
                const torch::NoGradGuard no_grad;
                rank.allreduce(w * w);
                rank.broadcast(w);
              }),
              IsEmpty());
}

// Frozen before the first backward, to be trained later on.
TEST(TrainingLoop, AParameterThatIsFrozenMeanwhileIsNotCalledUnused) {
  for (const bool frozen : {false, true}) {
    const auto warnings = warnings_of(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Sequential({{"body", torch::nn::Linear(6, 6)}, {"head", torch::nn::Linear(6, 3)}}),
                       rank);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      for (auto& parameter : net->ptr(0)->parameters()) parameter.requires_grad_(!frozen);
      for (auto& batch : lockstep::batches(data, {.size = 4, .shuffle = false}, rank)) {
        sgd.zero_grad();
        net.loss(batch,
                 [&](const lockstep::Batch& part) {
                   return F::cross_entropy((*net)[1]->as<torch::nn::Linear>()->forward(part.x), part.y);
                 })
            .backward();
        sgd.step();
      }
    });
    const auto unused = HasSubstr("no rank used these parameters in the first backward: body.weight, body.bias");
    if (frozen) {
      EXPECT_THAT(warnings, IsEmpty());
    } else {
      EXPECT_THAT(warnings, Contains(unused));
    }
  }
}

}  // namespace training_loop_test
