// Labels: concurrency
// WeightAverage: against a loop of plain LibTorch, in each layout of a net; kept, and gone on with in another layout.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/lab/weight_average.hpp>
#include <lockstep/nn/weights.hpp>

#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/tensor_bits.hpp"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace weight_average_test {

using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

constexpr double kDecay = 0.75;

// A weight has two names, and another one is frozen.
struct Tied : nn::Module {
  Tied() {
    middle->bias.requires_grad_(false);
    to(torch::kDouble);
    register_parameter("again", first->weight);
  }
  Tensor forward(const Tensor& x) { return F::linear(torch::tanh(middle(torch::tanh(first(x)))), first->weight); }
  nn::Linear first = register_module("first", nn::Linear(5, 5));
  nn::Linear middle = register_module("middle", nn::Linear(5, 5));
};

std::shared_ptr<Tied> make_net() {
  torch::manual_seed(1);
  return std::make_shared<Tied>();
}

const Dataset kData{torch::arange(24 * 5, torch::kDouble).sin().view({24, 5}), torch::arange(24) % 5};
const BatchOptions kBatches{.size = 6, .shuffle = false, .grain = 2};

struct Layout {
  int ranks;
  Sharded sharded;
};
const std::vector<Layout> kLayouts = {{1, Sharded::nothing},
                                      {3, Sharded::nothing},
                                      {2, Sharded::state},
                                      {3, Sharded::gradients},
                                      {2, Sharded::parameters}};

std::string to_string(const Layout& layout) {
  return std::to_string(layout.ranks) + " ranks, stage " + std::to_string(static_cast<int>(layout.sharded));
}

void expect_weights_near(const Tied& net, const Tied& expected, const std::string& what) {
  for (const auto& item : expected.named_parameters())
    expect_near(net.named_parameters()[item.key()], item.value(), 1e-12, what + ", " + item.key());
}

// Plain LibTorch's weights after an epoch of four steps, and their average.
std::pair<std::shared_ptr<Tied>, std::shared_ptr<Tied>> by_libtorch() {
  const auto net = make_net(), average = make_net();
  optim::Adam adam({net->first->weight, net->first->bias, net->middle->weight}, optim::AdamOptions(0.05));
  for (int step = 0; step < 4; ++step) {
    adam.zero_grad();
    F::cross_entropy(net->forward(kData.x.slice(0, 6 * step, 6 * step + 6)), kData.y.slice(0, 6 * step, 6 * step + 6))
        .backward();
    adam.step();
    const torch::NoGradGuard no_grad;
    for (const auto& [mean, weight] :
         {std::pair(average->first->weight, net->first->weight), std::pair(average->first->bias, net->first->bias),
          std::pair(average->middle->weight, net->middle->weight)}) {
      const Tensor mean_of_both = mean * kDecay + weight * (1 - kDecay);
      mean.copy_(step == 0 ? weight : mean_of_both);
    }
  }
  return {net, average};
}

// Trains an epoch from batch `begin` to batch `end`, between what the net and its average were loaded from and saved
// to.
void train(const Layout& layout, const ScratchFolder& folder, int begin, int end) {
  run(test_devices(static_cast<size_t>(layout.ranks)), [&](Rank& rank) {
    const auto module = rank.in_turn([] { return make_net(); });
    DataParallel<Tied> net(module, rank, {.bucket_bytes = 256, .sharded = layout.sharded});
    Optimizer adam(net, optim::AdamOptions(0.05));
    WeightAverage average(net, kDecay);
    const auto load = [&](const std::string& name) {
      const auto whole = net.whole();
      load_weights(folder / name, *net);
    };
    if (begin > 0) {
      load("average");
      average.add();
      load("net");
      adam.load(folder / "adam");
    }
    int step = 0;
    for (const auto& batch : batches(kData.to(rank.device()), kBatches, rank)) {
      if (step++ < begin) continue;
      if (step > end) break;
      adam.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      adam.step();
      average.add();
    }
    adam.save(folder / "adam");
    const auto save = [&](const std::string& name) {
      if (rank.index() == 0) save_weights(folder / name, *net);
    };
    {
      const auto shown = average.shown();
      save("average");
      EXPECT_THAT(error_of([&] { average.add(); }), Refused());
    }
    const auto whole = net.whole();
    save("net");
  });
}

std::shared_ptr<Tied> loaded(const std::filesystem::path& file) {
  auto net = make_net();
  load_weights(file, *net);
  return net;
}

TEST(WeightAverages, AreThoseOfALoopOfLibTorchAndGoOnInAnyOtherLayoutWithTheSameBits) {
  const auto [weights, average] = by_libtorch();
  ASSERT_FALSE(torch::allclose(weights->first->weight, average->first->weight, 1e-3));
  TensorBits bits;
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    const ScratchFolder whole, halves;
    train(kLayouts[i], whole, 0, 4);
    expect_weights_near(*loaded(whole / "net"), *weights, to_string(kLayouts[i]));
    expect_weights_near(*loaded(whole / "average"), *average, to_string(kLayouts[i]));
    if (i == 0) bits = tensor_bits(*loaded(whole / "average"));
    EXPECT_EQ(tensor_bits(*loaded(whole / "average")), bits) << to_string(kLayouts[i]);

    train(kLayouts[i], halves, 0, 2);
    train(kLayouts[(i + 2) % kLayouts.size()], halves, 2, 4);
    EXPECT_EQ(tensor_bits(*loaded(halves / "average")), bits) << to_string(kLayouts[i]);
    EXPECT_EQ(tensor_bits(*loaded(halves / "net")), tensor_bits(*loaded(whole / "net"))) << to_string(kLayouts[i]);
  }
}

TEST(WeightAverages, BeforeTheFirstStepShowTheWeights) {
  run(test_devices(1), [](Rank& rank) {
    DataParallel<Tied> net(make_net(), rank);
    WeightAverage average(net, 0);
    const auto bits = tensor_bits(*net);
    {
      const auto shown = average.shown();
      EXPECT_EQ(tensor_bits(*net), bits);
    }
    EXPECT_FALSE(average.is_begun());
    average.add();
    EXPECT_TRUE(average.is_begun());
    for (const double decay : {-0.1, 1., std::nan("")}) {
      EXPECT_THAT(error_of([&] { WeightAverage(net, decay); }), Refused());
    }
  });
}

}  // namespace weight_average_test
}  // namespace lockstep
