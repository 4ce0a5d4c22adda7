// Labels: arithmetic 3x3 2x4
// Clipping: the norm and the steps of LibTorch's on one device, however gradients are shared out.
#include "data_parallel/averaged_gradients.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/group_tests.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace clipping_test {

using namespace lockstep;
using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

constexpr double kMaxNorm = 0.2;  // below most of the norms
constexpr int kSteps = 6;

// Counts of units divide by 2 to 4; fc3 is held whole, and scale is one number.
Sequential make_net() {
  torch::manual_seed(3);
  torch::nn::Linear fc1(6, 12), fc2(12, 24), fc3(24, 12);
  Sequential net;
  net->push_back("fc1", fc1);
  net->push_back("tanh1", torch::nn::Tanh());
  net->push_back("fc2", fc2);
  net->push_back("tanh2", torch::nn::Tanh());
  net->push_back("fc3", fc3);
  net->to(torch::kDouble);
  return net;
}

std::vector<Batch> make_batches() {
  torch::manual_seed(4);
  std::vector<Batch> batches;
  for (int step = 0; step < kSteps; ++step) {
    const Tensor x = torch::randn({9 - step, 6}, torch::kDouble) * 3;
    batches.push_back({x, torch::randint(12, {9 - step}), 9 - step});
  }
  return batches;
}

Batch part_for(const Batch& batch, const Rank& rank) {
  const Range part = part_of(batch.size(), rank.index(), rank.world_size());
  return {batch.x.slice(0, part.begin, part.end).to(rank.device()),
          batch.y.slice(0, part.begin, part.end).to(rank.device()), batch.global_size};
}

const torch::optim::AdamWOptions kAdam(0.02);

struct Expected {
  std::vector<double> norms;
  Sequential net;
};

Expected train_whole() {
  Expected expected{.norms = {}, .net = make_net()};
  torch::optim::AdamW adam(expected.net->parameters(), kAdam);
  for (const auto& batch : make_batches()) {
    adam.zero_grad();
    F::cross_entropy(expected.net->forward(batch.x), batch.y).backward();
    expected.norms.push_back(torch::nn::utils::clip_grad_norm_(expected.net->parameters(), kMaxNorm));
    adam.step();
  }
  EXPECT_GT(expected.norms[0], kMaxNorm);
  return expected;
}

void expect_parameters(const torch::nn::Module& net, const Expected& expected) {
  for (const auto& item : net.named_parameters()) {
    expect_near(item.value().detach(), expected.net->named_parameters()[item.key()].detach(), 1e-10, item.key());
  }
}

// In run(), nets are made one after the other: they are of LibTorch's one generator.
Sequential net_of(Rank& rank) {
  return rank.in_turn([] { return make_net(); });
}

class ClippingWorlds : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, ClippingWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(ClippingWorlds, OfADataParallelIsThatOfOneDevice) {
  const Expected expected = train_whole();
  const auto batches = make_batches();
  for (const int stage : {0, 1, 2, 3}) {
    on_ranks([&](Rank& rank) {
      DataParallel net(net_of(rank), rank, {.bucket_bytes = 700, .sharded = static_cast<Sharded>(stage)});
      Optimizer adam(net, kAdam);
      for (int step = 0; step < kSteps; ++step) {
        adam.zero_grad();
        net.loss(part_for(batches[step], rank), F::cross_entropy).backward();
        EXPECT_NEAR(adam.step({.clip = kMaxNorm}).norm.item<double>(), expected.norms[step], 1e-10) << stage;
      }
      const auto whole = net.whole();
      expect_parameters(*net, expected);
    });
  }
}

TEST_P(ClippingWorlds, OfASplitModelIsThatOfOneDevice) {
  const Expected expected = train_whole();
  const auto batches = make_batches();
  const int world = GetParam();
  std::vector<MeshShape> meshes = {{.data = world}, {.tensor = world}};
  if (world <= 3) meshes.push_back({.pipeline = world});
  if (world == 4) {
    meshes.push_back({.data = 2, .tensor = 2});
    meshes.push_back({.data = 2, .pipeline = 2});
    meshes.push_back({.pipeline = 2, .tensor = 2});
  }
  for (const auto& mesh : meshes) {
    // The replicas of a stage, or of slices of layers, share out the optimizer's state.
    for (int stage = 0; stage <= (mesh.data > 1 ? 2 : 0); ++stage) {
      SCOPED_TRACE(to_string(mesh) + ", stage " + std::to_string(stage));
      on_ranks([&](Rank& rank) {
        SplitModel net(net_of(rank), rank, {.mesh = mesh},
                       {.bucket_bytes = 700, .sharded = static_cast<Sharded>(stage)});
        Optimizer adam(net, kAdam);
        for (int step = 0; step < kSteps; ++step) {
          adam.zero_grad();
          net.loss(part_for(batches[step], net.mesh().data()), F::cross_entropy).backward();
          EXPECT_NEAR(adam.step({.clip = kMaxNorm}).norm.item<double>(), expected.norms[step], 1e-10);
        }
        auto whole = net_of(rank);
        net.gather(whole);
        expect_parameters(*whole, expected);
      });
    }
  }
}

struct ComplexNet : torch::nn::Module {
  explicit ComplexNet(torch::ScalarType type) {
    const Tensor parts = torch::arange(12.0).to(c10::toRealValueType(type)).view({6, 2}).sin().contiguous();
    w = register_parameter("w", torch::view_as_complex(parts).clone());
  }
  Tensor forward(const Tensor& x) { return (x.to(w.scalar_type()) * w).sum(1).abs(); }
  Tensor w;
};

TEST_P(ClippingWorlds, OfComplexParametersIsLibTorchs) {
  const auto criterion = [](const Tensor& y_hat, const Tensor&) { return y_hat.mean(); };
  const auto batches = make_batches();
  for (const auto type : {torch::kComplexFloat, torch::kComplexDouble}) {
    const double tolerance = type == torch::kComplexFloat ? 1e-5 : 1e-12;
    ComplexNet one(type);
    criterion(one.forward(batches[0].x), {}).backward();
    const double norm = torch::nn::utils::clip_grad_norm_(one.parameters(), kMaxNorm);
    ASSERT_GT(norm, kMaxNorm);
    on_ranks([&](Rank& rank) {
      DataParallel net(ComplexNet(type), rank);
      net.loss(part_for(batches[0], rank), criterion).backward();
      EXPECT_TRUE(has_finite_gradients(*net.trained()));
      EXPECT_NEAR(clip_gradients(*net.trained(), kMaxNorm).item<double>(), norm, tolerance * norm);
      expect_near(net->w.grad(), one.w.grad(), tolerance, "the clipped gradient");
      torch::imag(net->w.grad())[3].fill_(std::numeric_limits<double>::quiet_NaN());
      EXPECT_FALSE(has_finite_gradients(*net.trained()));
    });
  }
}

// Gradients of so few digits that averages over up to 4 ranks are exact.
struct Scattered : torch::nn::Module {
  Scattered() {
    torch::manual_seed(7);
    for (const int64_t size : {1, 30, 1001, 4, 20000, 77}) {
      const std::string number = std::to_string(digits.size());
      parameters_of_it.push_back(register_parameter("p" + number, torch::zeros({size}, torch::kDouble)));
      digits.push_back((torch::randn({size}) * torch::randn({size}).exp()).to(torch::kDouble));
    }
  }
  Tensor loss() const {
    Tensor sum = torch::zeros({}, torch::kDouble);
    for (size_t i = 0; i < digits.size(); ++i) sum = sum + (parameters_of_it[i] * digits[i]).sum();
    return sum;
  }
  std::vector<Tensor> parameters_of_it, digits;
};

TEST(Clipping, HasTheSameBitsWhereverTheGradientsLie) {
  std::vector<double> norms;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int stage : {0, 1, 2}) {
      for (const int64_t bucket_bytes : {100, 1000, 1 << 20}) {
        run(test_devices(ranks), [&](Rank& rank) {
          const auto module = rank.in_turn([] { return std::make_shared<Scattered>(); });
          DataParallel net(module, rank, {.bucket_bytes = bucket_bytes, .sharded = static_cast<Sharded>(stage)});
          Optimizer adam(net, kAdam);
          net.mean(module->loss(), 1, ranks).backward();
          const double norm = adam.step({.clip = kMaxNorm}).norm.item<double>();
          if (rank.index() == 0) norms.push_back(norm);
          rank.barrier();
          EXPECT_EQ(norm, norms[0]) << ranks << " ranks, stage " << stage << ", " << bucket_bytes << " bytes";
        });
      }
    }
  }
  EXPECT_GT(norms[0], kMaxNorm);
}

// The first rank of the data axis has all samples, so the averages are exact.
TEST(Clipping, HasTheSameBitsOnAnyNumberOfStages) {
  const Batch whole = make_batches()[0];
  std::vector<double> norms;
  for (const MeshShape& mesh : {MeshShape{}, MeshShape{.pipeline = 2}, MeshShape{.pipeline = 3}, MeshShape{.data = 2},
                                MeshShape{.data = 2, .pipeline = 2}, MeshShape{.data = 2, .pipeline = 3}}) {
    for (const int stage : {0, 1, 2}) {
      SCOPED_TRACE(to_string(mesh) + ", stage " + std::to_string(stage));
      run(test_devices(mesh.data * mesh.pipeline), [&](Rank& rank) {
        SplitModel net(net_of(rank), rank, {.mesh = mesh, .microbatches = 1},
                       {.bucket_bytes = 700, .sharded = static_cast<Sharded>(stage)});
        Optimizer adam(net, kAdam);
        const int64_t samples = net.mesh().data().index() == 0 ? whole.size() : 0;
        net.loss({whole.x.narrow(0, 0, samples), whole.y.narrow(0, 0, samples), whole.size()}, F::cross_entropy)
            .backward();
        const double norm = adam.step({.clip = kMaxNorm}).norm.item<double>();
        if (rank.index() == 0) norms.push_back(norm);
        rank.barrier();
        EXPECT_EQ(norm, norms[0]);
      });
    }
  }
}

TEST(Clipping, SmallGradientsStayAsTheyAre) {
  run(test_devices(2), [](Rank& rank) {
    DataParallel net(net_of(rank), rank);
    net.loss(part_for(make_batches()[0], rank), F::cross_entropy).backward();
    const Tensor before = net->parameters()[0].grad().clone();
    clip_gradients(*net.trained(), 1e6);
    EXPECT_TRUE(net->parameters()[0].grad().equal(before));
    clip_gradients(*net.trained(), std::numeric_limits<double>::infinity());
    EXPECT_TRUE(net->parameters()[0].grad().equal(before));
  });
}

TEST(Clipping, AParameterWithTwoNamesCountsOnce) {
  struct Tied : torch::nn::Module {
    torch::nn::Linear encode = register_module("encode", torch::nn::Linear(6, 6));
    torch::nn::Linear decode = register_module("decode", encode);
    Tensor forward(const Tensor& x) { return decode(encode(x).tanh()); }
  };
  run(test_devices(2), [](Rank& rank) {
    DataParallel net(rank.in_turn([] { return Tied(); }), rank);
    net.loss({torch::ones({2, 6}), torch::zeros({2}, torch::kLong), 4}, F::cross_entropy).backward();
    const Tensor weight = net->encode->weight.grad().clone(), bias = net->encode->bias.grad().clone();
    const double norm = std::sqrt((weight.square().sum() + bias.square().sum()).item<double>());
    EXPECT_NEAR(clip_gradients(*net.trained(), norm / 4).item<double>(), norm, 1e-6);
    expect_near(net->encode->weight.grad(), weight / 4, 1e-6, "weight");
  });
}

TEST(Clipping, LimitsThatAreNoneAreRefused) {
  for (const double limit : {-1.0, std::nan("")}) {
    EXPECT_THAT(error_on_ranks(1,
                               [&](Rank& rank) {
                                 DataParallel net(net_of(rank), rank);
                                 Optimizer(net, kAdam).step({.clip = limit});
                               }),
                Refused());
  }
}

TEST(Clipping, WithoutAveragedGradientsAShardedNetHasNone) {
  EXPECT_THAT(error_on_ranks(2,
                             [&](Rank& rank) {
                               DataParallel net(net_of(rank), rank, {.sharded = Sharded::state});
                               Optimizer(net, kAdam).step({.clip = 1});
                             }),
              Refused());
}

// Everybody writes this first. It would find no gradients.
TEST(Clipping, TorchsOwnOfAShardedNetIsRefused) {
  for (const int stage : {1, 2, 3}) {
    EXPECT_THAT(error_on_ranks(2,
                               [&](Rank& rank) {
                                 DataParallel net(net_of(rank), rank, {.sharded = static_cast<Sharded>(stage)});
                                 Optimizer adam(net, kAdam);
                                 net.loss(part_for(make_batches()[0], rank), F::cross_entropy).backward();
                                 torch::nn::utils::clip_grad_norm_(net->parameters(), kMaxNorm / 10);
                                 adam.step();
                               }),
                Refused())
        << stage;
  }
}

}  // namespace clipping_test
