// Labels: arithmetic 3x3 2x4
// PowerSgdHook over 1 to 4 CPU ranks, against the paper's algorithms 1 and 2 written out in float64.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/power_sgd.hpp>
#include <lockstep/ranks/traffic.hpp>

#include "data_parallel/backward_report.hpp"
#include "data_parallel/replica.hpp"
#include "support/group_tests.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace power_sgd_test {

using torch::Tensor;
namespace nn = torch::nn;

using PowerSgdWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, PowerSgdWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// A dense layer's weight and bias and a convolution's weight, whose gradients are what backward() is given.
struct Weights : nn::Module {
  explicit Weights(torch::ScalarType type = torch::kDouble) {
    dense = register_parameter("dense", torch::zeros({7, 5}, type));
    bias = register_parameter("bias", torch::zeros({7}, type));
    conv = register_parameter("conv", torch::zeros({4, 3, 2, 2}, type).contiguous(at::MemoryFormat::ChannelsLast));
  }
  Tensor dense, bias, conv;
};

struct Gradients {
  Tensor dense = torch::randn({7, 5}, torch::kDouble);
  Tensor bias = torch::randn({7}, torch::kDouble);
  Tensor conv = torch::randn({4, 3, 2, 2}, torch::kDouble);
};

void backward_with(DataParallel<Weights>& net, const Gradients& gradients, double times = 1) {
  net->zero_grad();
  net.backward_through([&] {
    const auto part = [&](const Tensor& weight, const Tensor& gradient) {
      return (weight * (gradient * times).to(weight.device(), weight.scalar_type())).sum();
    };
    (part(net->dense, gradients.dense) + part(net->bias, gradients.bias) + part(net->conv, gradients.conv)).backward();
  });
}

using Table = std::vector<std::vector<Gradients>>;  // by step and rank

Table make_gradients(int steps, int ranks) {
  Table table(steps);
  for (auto& step : table) step.resize(ranks);
  return table;
}

// ---- The paper, for one matrix.

Tensor orthogonalised(Tensor p) {  // Gram and Schmidt
  for (int64_t i = 0; i < p.size(1); ++i) {
    for (int64_t j = 0; j < i; ++j) p.select(1, i).sub_(p.select(1, j) * p.select(1, j).dot(p.select(1, i)));
    p.select(1, i).div_(p.select(1, i).norm());
  }
  return p;
}

struct Paper {
  Tensor q;
  std::vector<Tensor> errors;  // by rank

  Tensor step(const std::vector<Tensor>& gradients) {
    const auto ranks = gradients.size();
    std::vector<Tensor> deltas;
    Tensor p = torch::zeros({gradients[0].size(0), q.size(1)}, torch::kDouble);
    for (size_t rank = 0; rank < ranks; ++rank) {
      deltas.push_back(gradients[rank] + errors[rank]);
      p += deltas[rank].mm(q) / static_cast<double>(ranks);
    }
    p = orthogonalised(p);
    Tensor mean = torch::zeros_like(q);
    for (size_t rank = 0; rank < ranks; ++rank) {
      const Tensor own = deltas[rank].t().mm(p);
      errors[rank] = deltas[rank] - p.mm(own.t());
      mean += own / static_cast<double>(ranks);
    }
    q = mean;
    return p.mm(q.t());
  }
};

TEST_P(PowerSgdWorlds, FollowsThePaper) {
  const int steps = 5;
  const Table gradients = make_gradients(steps, GetParam());
  for (const int64_t r : {1, 2, 3}) {
    const Tensor dense_q = torch::randn({5, r}, torch::kDouble), conv_q = torch::randn({12, r}, torch::kDouble);
    Paper dense{dense_q.clone(), std::vector<Tensor>(GetParam(), torch::zeros({7, 5}, torch::kDouble))};
    Paper conv{conv_q.clone(), std::vector<Tensor>(GetParam(), torch::zeros({4, 12}, torch::kDouble))};
    std::vector<Tensor> dense_means, conv_means, biases;
    for (const auto& step : gradients) {
      std::vector<Tensor> of_dense, of_conv;
      Tensor bias = torch::zeros({7}, torch::kDouble);
      for (const auto& rank : step) {
        of_dense.push_back(rank.dense);
        of_conv.push_back(rank.conv.flatten(1));
        bias += rank.bias / GetParam();
      }
      dense_means.push_back(dense.step(of_dense));
      conv_means.push_back(conv.step(of_conv));
      biases.push_back(bias);
    }
    on_ranks([&](Rank& rank) {
      const auto hook = std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = r, .min_compression = 0});
      hook->load({{"dense", torch::zeros({7, 5}, torch::kDouble)}, {"conv", torch::zeros({4, 12}, torch::kDouble)}},
                 {{"dense", dense_q}, {"conv", conv_q}}, rank.device());
      // One bucket, then buckets of their own.
      DataParallel net(Weights(), rank,
                       r == 2 ? DataParallelOptions{.bucket_bytes = 1, .first_bucket_bytes = 1, .hook = hook}
                              : DataParallelOptions{.hook = hook});
      for (int step = 0; step < steps; ++step) {
        const std::string what = "rank " + std::to_string(r) + ", step " + std::to_string(step);
        backward_with(net, gradients[step][rank.index()]);
        expect_near(net->dense.grad(), dense_means[step], 1e-10, what);
        expect_near(net->conv.grad().flatten(1), conv_means[step], 1e-10, what);
        expect_near(net->bias.grad(), biases[step], 1e-12, what);
        expect_equal_on_all_ranks(net->dense.grad(), rank, what);
        expect_equal_on_all_ranks(net->conv.grad(), rank, what);
      }
      EXPECT_EQ(net->conv.grad().strides(), net->conv.strides());
      for (const auto& [name, error] : hook->errors()) {
        expect_near(error, (name == "dense" ? dense : conv).errors[rank.index()], 1e-10, "error of " + name);
      }
    });
  }
}

TEST_P(PowerSgdWorlds, OfFullRankItIsThePlainAverage) {
  const Table gradients = make_gradients(3, GetParam());
  on_ranks([&](Rank& rank) {
    DataParallel plain(Weights(), rank);
    const auto hook = std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = 100, .min_compression = 0});
    DataParallel net(Weights(), rank, {.hook = hook});
    for (const auto& step : gradients) {
      backward_with(plain, step[rank.index()]);
      backward_with(net, step[rank.index()]);
      expect_near(net->dense.grad(), plain->dense.grad(), 1e-12, "dense");
      expect_near(net->conv.grad(), plain->conv.grad(), 1e-12, "conv");
      for (const auto& [name, own] : hook->errors()) {
        // P spans all that has four rows, and the mean of what has seven, but not each rank's own.
        Tensor error = own.clone();
        if (name == "dense") rank.allreduce(error, c10d::ReduceOp::AVG);
        expect_near(error, torch::zeros_like(error), 1e-12, "error of " + name);
      }
    }
  });
}

// Also after a step without any gradient, whose Q is zero.
TEST_P(PowerSgdWorlds, WhatIsLeftOutComesLater) {
  const Table gradients = make_gradients(2, GetParam());
  on_ranks([&](Rank& rank) {
    const auto hook = std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = 1, .min_compression = 0, .seed = 3});
    DataParallel net(Weights(), rank, {.hook = hook});
    Tensor came = torch::zeros({7, 5}, torch::dtype(torch::kDouble).device(rank.device()));
    Tensor all = torch::zeros_like(came);
    double left = 0;
    for (int step = 0; step < 42; ++step) {
      const bool some = step == 1 || step == 2;
      const Gradients& given = gradients[step % 2][rank.index()];
      backward_with(net, given, some ? 1 : 0);
      came += net->dense.grad();
      Tensor mean = given.dense.to(rank.device()) * (some ? 1.0 : 0.0), error = hook->errors()[1].second.clone();
      ASSERT_EQ(hook->errors()[1].first, "dense");
      rank.allreduce(mean, c10d::ReduceOp::AVG);
      rank.allreduce(error, c10d::ReduceOp::AVG);
      all += mean;
      expect_near(came + error, all, 1e-12, "step " + std::to_string(step));
      if (step == 2) left = error.norm().item<double>();
    }
    EXPECT_GT(left, 0.1);  // it was left out …
    expect_near(came, all, 1e-6, "all of it");
  });
}

TEST_P(PowerSgdWorlds, GoesOnFromWhatItRemembered) {
  const Table gradients = make_gradients(4, GetParam());
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    on_ranks([&](Rank& rank) {
      const PowerSgdOptions options{.rank = 2, .min_compression = 0};
      const auto whole = std::make_shared<PowerSgdHook>(options), first = std::make_shared<PowerSgdHook>(options);
      const auto second = std::make_shared<PowerSgdHook>(options);
      DataParallel net(Weights(type), rank, {.hook = whole}), before(Weights(type), rank, {.hook = first});
      DataParallel after(Weights(type), rank, {.hook = second});
      for (int step = 0; step < 4; ++step) {
        auto& stopped = step < 2 ? before : after;
        if (step == 2) {
          second->load(first->errors(), first->queries(), rank.device());
          after.replica()->averaging()->set_order(before.replica()->averaging()->order());
        }
        backward_with(net, gradients[step][rank.index()]);
        backward_with(stopped, gradients[step][rank.index()]);
        EXPECT_TRUE(net->dense.grad().equal(stopped->dense.grad())) << step;
        EXPECT_TRUE(net->conv.grad().equal(stopped->conv.grad())) << step;
        EXPECT_EQ(net->dense.grad().scalar_type(), type);
      }
    });
  }
}

TEST_P(PowerSgdWorlds, SendsThinMatricesAndTheRestWhole) {
  const Gradients gradients;
  on_ranks([&](Rank& rank) {
    const auto values_sent = [&](const PowerSgdOptions& options) {
      const auto traffic = std::make_shared<Traffic>();
      Rank counted = Traffic::observed(rank, traffic);
      DataParallel net(Weights(), counted, {.hook = std::make_shared<PowerSgdHook>(options)});
      backward_with(net, gradients);
      traffic->sent = 0;
      backward_with(net, gradients);
      const int64_t report = 8 * lockstep::BackwardReport::size(3, rank.world_size()) * (rank.world_size() - 1);
      return (traffic->sent * rank.world_size() / 2 - static_cast<double>(report)) / 8;
    };
    const int others = rank.world_size() - 1;
    EXPECT_NEAR(values_sent({.rank = 1}), (7 + (7 + 5) + (4 + 12)) * others, 1e-6);
    EXPECT_NEAR(values_sent({.rank = 2}), (7 + 2 * (7 + 5) + 2 * (4 + 12)) * others, 1e-6);
    EXPECT_NEAR(values_sent({.rank = 3}), (7 + 35 + 48) * others, 1e-6);  // factors would send 36 and 48
    EXPECT_NEAR(values_sent({.rank = 1, .min_compression = 2.95}), (7 + 35 + (4 + 12)) * others, 1e-6);
  });
}

TEST(PowerSgd, RefusesWhatMakesNoSense) {
  const auto refused = [](const PowerSgdOptions& options) { return error_of([&] { PowerSgdHook hook(options); }); };
  EXPECT_THAT(refused({.rank = 0}), Refused());
  EXPECT_THAT(refused({.min_compression = std::nan("")}), Refused());
  PowerSgdHook hook;
  EXPECT_THAT(error_of([&] { hook.load({{"w", torch::zeros({2, 2})}}, {}, torch::kCPU); }), Refused());
}

TEST(PowerSgd, RefusesToGoOnFromAnotherNetworksMemory) {
  const auto refused = [](const Tensor& error, const Tensor& query) {
    PowerSgdHook hook(PowerSgdOptions{.rank = 2});
    return error_of([&] { hook.load({{"w", error}}, {{"w", query}}, torch::kCPU); });
  };
  EXPECT_EQ(refused(torch::zeros({7, 5}), torch::zeros({5, 2})), "(no error)");
  EXPECT_THAT(refused(torch::zeros({7, 5}), torch::zeros({7, 2})), Refused());
  EXPECT_THAT(refused(torch::zeros({7, 5}), torch::zeros({5, 4})), Refused());
  EXPECT_THAT(refused(torch::zeros({7, 5}), torch::zeros({5, 2}, torch::kDouble)), Refused());
  EXPECT_THAT(refused(torch::zeros({35}), torch::zeros({5, 2})), Refused());

  // Each rank finds alone whether the memory fits the network, when the gradients come.
  const Gradients gradients;
  const auto text = error_on_ranks(2, [&](Rank& rank) {
    const auto hook = std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = 2, .min_compression = 0});
    const int64_t columns = rank.index() == 1 ? 6 : 5;
    hook->load({{"dense", torch::zeros({7, columns}, torch::kDouble)}},
               {{"dense", torch::zeros({columns, 2}, torch::kDouble)}}, rank.device());
    DataParallel net(Weights(), rank, {.hook = hook});
    backward_with(net, gradients);
  });
  EXPECT_THAT(text, Refused());
}

}  // namespace power_sgd_test
}  // namespace lockstep
