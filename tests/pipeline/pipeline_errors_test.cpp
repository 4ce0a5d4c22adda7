// Labels: concurrency
// Pipeline and split_into_stages: what is refused and warned of, and what the text says.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/split/split_model.hpp>

#include "support/error_of.hpp"
#include "support/lone_pipeline.hpp"
#include "support/seed_warnings.hpp"
#include "support/small_nets.hpp"
#include "support/test_devices.hpp"

#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace pipeline_errors_test {

using lockstep::Batch;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::Lambda;
using lockstep::LonePipeline;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::split_into_stages;
using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

Sequential linears(int count, int64_t width = 4) {
  Sequential net;
  for (int i = 0; i < count; ++i) net->push_back(nn::Linear(width, width));
  return net;
}

lockstep::Caught error_in(int ranks, const std::function<void(Rank&)>& body) {
  return error_of([&] { lockstep::run(lockstep::test_devices(ranks), body); });
}

TEST(SplitIntoStagesTest, StagesShareTheNetsLayersUnderTheirNames) {
  const Sequential net({{"first", nn::AnyModule(nn::Linear(2, 3))},
                        {"second", nn::AnyModule(nn::Tanh())},
                        {"third", nn::AnyModule(nn::Linear(3, 1))}});
  const auto stages = split_into_stages(net, {.mesh = {.pipeline = 2}, .cuts = {2}});
  ASSERT_EQ(stages.size(), 2u);
  EXPECT_EQ(stages[0]->size(), 2u);
  ASSERT_TRUE(stages[1]->named_parameters().contains("third.weight"));
  EXPECT_TRUE(stages[1]->named_parameters()["third.weight"].is_same(net->named_parameters()["third.weight"]));
  const auto equal = split_into_stages(linears(7), {.mesh = {.pipeline = 3}});
  EXPECT_EQ(equal[0]->size(), 3u);
  EXPECT_EQ(equal[1]->size(), 2u);
  EXPECT_TRUE(equal[2]->named_parameters().contains("6.bias"));
}

TEST(SplitIntoStagesTest, AParameterOfTwoStagesIsRefused) {
  const nn::Linear shared(4, 4);
  const Sequential net(shared, nn::Tanh(), shared);
  EXPECT_THAT(error_of([&] { split_into_stages(net, {.mesh = {.pipeline = 2}}); }), Refused());
  EXPECT_EQ(split_into_stages(net, {}).size(), 1u);
}

TEST(PipelineErrorsTest, SplitsThatDifferBetweenRanksAreRefused) {
  EXPECT_THAT(error_in(2, [](Rank& rank) { LonePipeline(linears(2), rank, {.microbatches = 2 + rank.index()}); }),
              Fails(Error::difference));
}

TEST(PipelineErrorsTest, RandomLayersAreRefusedWhereForwardIsComputedAgain) {
  const auto error_with = [](const nn::AnyModule& layer, bool recompute) {
    return error_in(2, [&](Rank& rank) {
      Sequential net = linears(1);
      net->push_back("random", layer);
      lockstep::SplitModel(net, rank, {.mesh = {.pipeline = 2}, .recompute = recompute});
    });
  };
  for (const auto& layer :
       {nn::AnyModule(nn::Dropout(0.5)), nn::AnyModule(nn::Dropout2d(0.1)), nn::AnyModule(nn::AlphaDropout(0.1)),
        nn::AnyModule(nn::LSTM(nn::LSTMOptions(4, 4).num_layers(2).dropout(0.5))), nn::AnyModule(nn::RReLU())}) {
    EXPECT_THAT(error_with(layer, true), Refused());
    EXPECT_EQ(error_with(layer, false), "(no error)");
  }
  EXPECT_EQ(error_with(nn::AnyModule(nn::Dropout(0.0)), true), "(no error)");
}

TEST(PipelineErrorsTest, ShapesThatDoNotChainAreRefusedBeforeTheFirstStep) {
  const Batch batch{torch::randn({6, 4}), torch::randint(4, {6}), 6};
  const auto error_with = [&](const nn::AnyModule& second, const nn::AnyModule& third) {
    int steps = 0;
    const auto error = error_in(2, [&](Rank& rank) {
      Sequential net({{"first", nn::AnyModule(nn::Linear(4, 5))}, {"second", second}, {"third", third}});
      const auto criterion = [&](const Tensor& y_hat, const Tensor&) { return ++steps, y_hat.sum(); };
      LonePipeline(net, rank, {.microbatches = 4, .cuts = {2}}).forward_backward(batch, criterion);
    });
    EXPECT_EQ(steps, 0) << error;
    return error;
  };
  const nn::AnyModule linear(nn::Linear(5, 4));
  EXPECT_THAT(error_with(nn::AnyModule(nn::Tanh()), nn::AnyModule(nn::Linear(3, 4))), Fails(Error::user_code));
  EXPECT_THAT(error_with(nn::AnyModule(Lambda([](const Tensor& x) { return x.mean(0, /*keepdim=*/true); })), linear),
              Refused());
  EXPECT_THAT(error_with(nn::AnyModule(Lambda([](const Tensor& x) { return x.argmax(1); })), linear), Refused());
  EXPECT_THAT(error_with(nn::AnyModule(Lambda([](const Tensor&) { return Tensor(); })), linear), Refused());
  EXPECT_THAT(error_with(nn::AnyModule(nn::LSTM(5, 5)), linear), Fails(Error::user_code));
}

TEST(PipelineErrorsTest, AnOutputThatChangesItsShapeIsRefused) {
  EXPECT_THAT(error_in(2,
                       [](Rank& rank) {
                         const auto widen = [](const Tensor& x) { return x.sum().item<double>() == 0 ? x : x.t(); };
                         const Sequential net(Lambda{widen}, nn::Linear(4, 4));
                         LonePipeline pipeline(net, rank, {.microbatches = 1});
                         pipeline.forward_backward({torch::ones({6, 4}), torch::randint(4, {6}), 6}, F::cross_entropy);
                       }),
              Refused());
}

TEST(PipelineErrorsTest, BatchesThatDifferAreRefused) {
  const auto error_with = [](const Tensor& x, const Tensor& y) {
    return error_in(2, [&](Rank& rank) {
      LonePipeline pipeline(linears(2), rank);
      const Batch usual{torch::randn({6, 4}), torch::randint(4, {6}), 6};
      pipeline.forward_backward(rank.index() == 0 ? usual : Batch{x, y, x.size(0)}, F::cross_entropy);
    });
  };
  EXPECT_THAT(error_with(torch::randn({7, 4}), torch::randint(4, {7})), Fails(Error::difference));
  EXPECT_THAT(error_with(torch::randn({6, 3}), torch::randint(4, {6})), Fails(Error::difference));
  EXPECT_THAT(error_with(torch::randn({6, 4}), torch::randint(4, {5})), Refused());
}

// The first stage would train on samples of one batch, and the last one on targets of another.
TEST(PipelineErrorsTest, BatchesOfAnotherSeedAreRefused) {
  const lockstep::Dataset data{torch::randn({16, 4}), torch::randint(4, {16})};
  for (const int last : {1, 2}) {
    const auto error = error_in(last + 1, [&](Rank& rank) {
      LonePipeline pipeline(linears(3), rank);
      const uint64_t seed = rank.index() == 1 ? 8 : 7;
      for (auto& batch : lockstep::batches(data, {.size = 8, .seed = seed})) {
        pipeline.forward_backward(batch, F::cross_entropy);
      }
    });
    EXPECT_THAT(error, Fails(Error::difference));
  }
}

TEST(PipelineErrorsTest, ALossWithoutAGraphIsRefused) {
  const auto error_with = [](int ranks, bool recompute, bool detached, bool frozen) {
    return error_in(ranks, [&](Rank& rank) {
      Sequential net = linears(2);
      for (auto& parameter : net->parameters()) parameter.requires_grad_(!frozen);
      LonePipeline pipeline(net, rank, {.microbatches = 2, .recompute = recompute});
      const torch::AutoGradMode mode(detached);
      pipeline.forward_backward(
          {torch::randn({6, 4}), torch::randint(4, {6}), 6},
          [&](const Tensor& y_hat, const Tensor& y) { return F::cross_entropy(detached ? y_hat.detach() : y_hat, y); });
    });
  };
  for (const bool recompute : {false, true}) {
    for (const bool detached : {false, true}) {
      EXPECT_THAT(error_with(2, recompute, detached, false), Refused());
      EXPECT_THAT(error_with(1, recompute, detached, false), Refused());
      EXPECT_EQ(error_with(1, recompute, detached, true), "(no error)");  // nothing is to be trained
    }
  }
}

TEST(PipelineErrorsTest, CriteriaThatAreNoMeanAreRefused) {
  EXPECT_THAT(error_in(2,
                       [](Rank& rank) {
                         LonePipeline pipeline(linears(2), rank);
                         pipeline.forward_backward({torch::randn({6, 4}), torch::randn({6, 4}), 6},
                                                   [](const Tensor& a, const Tensor& b) { return a - b; });
                       }),
              Refused());
}

// Nothing is computed for stages without parameters, so it would get zeros.
TEST(PipelineErrorsTest, ATensorThatIsTrainedAndNoParameterIsRefused) {
  const auto error = error_in(2, [](Rank& rank) {
    const Tensor scale = torch::ones({4}, torch::kFloat).requires_grad_();
    const Sequential net(Lambda([&](const Tensor& x) { return x * scale; }), nn::Linear(4, 4));
    LonePipeline pipeline(net, rank);
    pipeline.forward_backward({torch::randn({8, 4}), torch::randint(4, {8}), 8}, F::cross_entropy);
  });
  EXPECT_THAT(error, Refused());
}

TEST(PipelineErrorsTest, ASeedInTheLoopIsWarnedOf) {
  const Batch batch{torch::ones({4, 3}), torch::zeros({4}, torch::kLong), 4};
  lockstep::expect_warned_of_a_seed_in_the_loop([&](Rank& rank, const Sequential& net, const auto& before_step) {
    LonePipeline pipeline(net, rank);
    before_step();
    pipeline.forward_backward(batch, F::cross_entropy);
  });
}

TEST(PipelineErrorsTest, LayersThatDrawFromTheSharedGeneratorAreWarnedOf) {
  const auto warnings = lockstep::warnings_in(2, [](Rank& rank) {
    LonePipeline(Sequential({{"linear", nn::AnyModule(nn::Linear(2, 2))}, {"drop", nn::AnyModule(nn::Dropout(0.5))}}),
                 rank);
  });
  EXPECT_THAT(warnings, testing::AllOf(testing::HasSubstr("rank 1 (cpu): Pipeline: drop draws"),
                                       testing::HasSubstr("lockstep::Dropout")));
}

TEST(PipelineErrorsTest, AStageThatFailsEndsAllRanks) {
  std::atomic<int> batches = 0;
  const Batch batch{torch::randn({8, 4}), torch::randint(4, {8}), 8};
  const auto error = error_in(3, [&](Rank& rank) {
    int calls = 0;
    const Sequential net({{"first", nn::AnyModule(nn::Linear(4, 4))},
                          {"fragile", nn::AnyModule(Lambda([&](const Tensor& x) {
                             return ++calls > 5 ? throw std::runtime_error("out of paper") : x;
                           }))},
                          {"last", nn::AnyModule(nn::Linear(4, 4))}});
    LonePipeline pipeline(net, rank);
    for (;; ++batches) pipeline.forward_backward(batch, F::cross_entropy);
  });
  EXPECT_THAT(error, Fails(Error::user_code));
  EXPECT_LE(batches, 3);
}

}  // namespace pipeline_errors_test
