// Labels: concurrency arithmetic
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/scratch/train_batch.hpp>
#include <lockstep/scratch/try_gpu.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <cmath>
#include <limits>

#include "support/error_of.hpp"

namespace lockstep {
namespace train_batch_test {

using Params = std::vector<torch::Tensor>;
namespace F = torch::nn::functional;

const c10::Device cpu(c10::kCPU);

std::vector<Params> copies_of(const Params& params, int devices) {
  std::vector<Params> copies;
  for (int i = 0; i < devices; ++i) copies.push_back(get_params(params, cpu));
  return copies;
}

Params lenet_like(torch::Dtype type) {  // larger than the section's weights, so that gradients reach every layer
  Params params;
  for (const auto& p : lenet_params()) params.push_back(torch::randn(p.sizes(), type) * 0.1);
  return params;
}

// An MLP that uses its first matrix twice (shared weights), and the last one never (an unused branch).
Params shared_mlp(int64_t width) {
  Params params;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{width, width}, {width}, {width, 3}, {width, 7}}) {
    params.push_back(torch::randn(shape, torch::kDouble) * 0.5);
  }
  return params;
}

torch::Tensor shared_mlp_loss(const torch::Tensor& x, const torch::Tensor& y, const Params& p) {
  const auto h = (x.matmul(p[0]) + p[1]).tanh();
  const auto logits = (h.matmul(p[0]) + p[1]).tanh().matmul(p[2]);
  return F::cross_entropy(logits, y, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

torch::Tensor lenet_mean_loss(const torch::Tensor& x, const torch::Tensor& y, const Params& p) {
  return F::cross_entropy(lenet(x, p), y);
}

// The results of one device on the whole batch with LibTorch alone: the reference for everything below.
struct Reference {
  double loss;
  Params gradients, updated;
};

template <typename MeanLoss>
Reference one_device(const torch::Tensor& x, const torch::Tensor& y, const Params& params, double lr, MeanLoss loss) {
  Params leafs;
  for (const auto& p : params) leafs.push_back(p.clone().requires_grad_());
  const auto mean = loss(x, y, leafs);
  mean.backward();
  Reference reference{mean.template item<double>(), {}, {}};
  for (const auto& p : leafs) {
    reference.gradients.push_back(p.grad().defined() ? p.grad() : torch::zeros_like(p));
    reference.updated.push_back(p.detach() - lr * reference.gradients.back());
  }
  return reference;
}

void expect_equal(const std::vector<Params>& device_params, const Reference& reference, double tolerance) {
  for (const auto& params : device_params) {
    for (size_t p = 0; p < params.size(); ++p) {
      EXPECT_TRUE(params[p].grad().allclose(reference.gradients[p], tolerance, tolerance)) << "gradient " << p;
      EXPECT_TRUE(params[p].allclose(reference.updated[p], tolerance, tolerance)) << "parameter " << p;
      EXPECT_TRUE(params[p].equal(device_params[0][p])) << "devices differ in parameter " << p;
    }
  }
}

TEST(GetParams, MakesIndependentLeafsWithZeroGradients) {
  const auto params = lenet_params();
  const auto copy = get_params(params, cpu);
  ASSERT_EQ(copy.size(), params.size());
  for (size_t i = 0; i < copy.size(); ++i) {
    EXPECT_TRUE(copy[i].is_leaf() && copy[i].requires_grad());
    EXPECT_TRUE(copy[i].equal(params[i]));
    EXPECT_FALSE(copy[i].is_alias_of(params[i]));
    EXPECT_TRUE(copy[i].grad().equal(torch::zeros_like(params[i])));
  }
  EXPECT_FALSE(params[0].requires_grad());
}

TEST(GetParams, CopiesLeafsAndResultsAlike) {
  const auto leaf = torch::ones({2}).requires_grad_();
  const auto copy = get_params({leaf, leaf * 2}, cpu);
  EXPECT_TRUE(copy[1].is_leaf());
  EXPECT_TRUE(copy[1].equal(torch::full({2}, 2.0f)));
  copy[0].detach().zero_();
  EXPECT_EQ(leaf.sum().item<float>(), 2);
  EXPECT_THAT(error_of([] { get_params({torch::ones({2}), torch::Tensor()}, cpu); }), Refused());
  EXPECT_THAT(error_of([] { get_params({torch::ones({2}, torch::kLong)}, cpu); }), Refused());
}

TEST(TrainBatch, LeNetEqualsOneDeviceInDouble) {
  for (int devices = 1; devices <= 5; ++devices) {
    for (int64_t samples : {1, 3, 8, 11}) {  // even, uneven, and fewer than devices
      torch::manual_seed(100 * devices + samples);
      const auto params = lenet_like(torch::kDouble);
      const auto x = torch::rand({samples, 1, 28, 28}, torch::kDouble);
      const auto y = torch::randint(10, {samples}, torch::kLong);
      const auto reference = one_device(x, y, params, 0.2, lenet_mean_loss);
      auto device_params = copies_of(params, devices);
      EXPECT_NEAR(train_batch(x, y, device_params, Devices(devices, cpu), 0.2), reference.loss, 1e-12);
      expect_equal(device_params, reference, 1e-12);
      EXPECT_GT(reference.gradients[0].abs().max().item<double>(), 1e-4);
    }
  }
}

TEST(TrainBatch, LeNetEqualsOneDeviceInFloatToRounding) {
  for (int devices = 2; devices <= 4; ++devices) {
    torch::manual_seed(devices);
    const auto params = lenet_like(torch::kFloat);
    const auto x = torch::rand({13, 1, 28, 28});
    const auto y = torch::randint(10, {13}, torch::kLong);
    const auto reference = one_device(x, y, params, 0.2, lenet_mean_loss);
    auto device_params = copies_of(params, devices);
    EXPECT_NEAR(train_batch(x, y, device_params, Devices(devices, cpu), 0.2), reference.loss, 1e-5);
    expect_equal(device_params, reference, 1e-4);
  }
}

TEST(TrainBatch, AnyModelEqualsOneDeviceForRandomShapes) {
  const auto mean_loss = [](const auto& x, const auto& y, const auto& p) {
    return shared_mlp_loss(x, y, p) / x.size(0);
  };
  for (int seed = 0; seed < 40; ++seed) {
    torch::manual_seed(seed);
    const int devices = 1 + seed % 5;
    const int64_t width = torch::randint(1, 9, {1}).item<int64_t>();
    const int64_t samples = torch::randint(1, 30, {1}).item<int64_t>();
    const auto params = shared_mlp(width);
    const auto x = torch::randn({samples, width}, torch::kDouble);
    const auto y = torch::randint(3, {samples}, torch::kLong);
    const auto reference = one_device(x, y, params, 0.3, mean_loss);
    auto device_params = copies_of(params, devices);
    const double loss = train_batch(x, y, device_params, Devices(devices, cpu), 0.3, shared_mlp_loss);
    EXPECT_NEAR(loss, reference.loss, 1e-12);
    expect_equal(device_params, reference, 1e-12);
    EXPECT_EQ(device_params[0][3].grad().abs().sum().item<double>(), 0) << "the unused branch";
  }
}

TEST(TrainBatch, ManyStepsStayEqualToOneDevice) {
  torch::manual_seed(3);
  auto params = shared_mlp(4);
  auto device_params = copies_of(params, 3);
  auto alone = copies_of(params, 1);
  const auto x = torch::randn({20, 4}, torch::kDouble);
  const auto y = torch::randint(3, {20}, torch::kLong);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 30; ++step) {
    last = train_batch(x, y, device_params, Devices(3, cpu), 0.5, shared_mlp_loss);
    EXPECT_NEAR(last, train_batch(x, y, alone, {cpu}, 0.5, shared_mlp_loss), 1e-12);
    if (step == 0) first = last;
  }
  EXPECT_LT(last, first);
  for (size_t p = 0; p < params.size(); ++p) EXPECT_TRUE(device_params[2][p].allclose(alone[0][p], 1e-11, 1e-11));
}

TEST(TrainBatch, StartsFromZeroWhateverGradientsWereThere) {
  torch::manual_seed(6);
  const auto params = shared_mlp(3);
  const auto x = torch::randn({5, 3}, torch::kDouble);
  const auto y = torch::randint(3, {5}, torch::kLong);
  auto clean = copies_of(params, 2);
  auto dirty = copies_of(params, 2);
  dirty[0][0].grad().fill_(7);
  dirty[1][1].mutable_grad() = torch::Tensor();
  train_batch(x, y, clean, Devices(2, cpu), 0.1, shared_mlp_loss);
  train_batch(x, y, dirty, Devices(2, cpu), 0.1, shared_mlp_loss);
  for (size_t i = 0; i < 2; ++i) {
    for (size_t p = 0; p < params.size(); ++p) EXPECT_TRUE(clean[i][p].equal(dirty[i][p]));
  }
}

TEST(TrainBatch, RecordsGradientsEvenIfTheCallerDoesNot) {
  const torch::NoGradGuard no_grad;
  auto device_params = copies_of(shared_mlp(2), 2);
  train_batch(torch::ones({4, 2}, torch::kDouble), torch::zeros({4}, torch::kLong), device_params, Devices(2, cpu), 0.1,
              shared_mlp_loss);
  EXPECT_GT(device_params[1][0].grad().abs().sum().item<double>(), 0);
}

// Calls train_batch on good arguments but for what `spoil` does to them; whatever is refused must change nothing.
struct Arguments {
  torch::Tensor x = torch::rand({4, 1, 28, 28});
  torch::Tensor y = torch::tensor({1, 2, 3, 4}, torch::kLong);
  std::vector<Params> device_params = copies_of(lenet_params(), 2);
  Devices devices = Devices(2, cpu);
  double lr = 0.2;
};

template <typename Spoil>
Caught refusal(Spoil spoil) {
  Arguments arguments;
  spoil(arguments);
  std::vector<Params> before;
  for (const auto& params : arguments.device_params) {
    before.emplace_back();
    for (const auto& p : params) before.back().push_back(p.defined() ? p.detach().clone() : p);
  }
  const auto error = error_of(
      [&] { train_batch(arguments.x, arguments.y, arguments.device_params, arguments.devices, arguments.lr); });
  for (size_t i = 0; i < before.size(); ++i) {
    for (size_t p = 0; p < before[i].size(); ++p) {
      if (before[i][p].defined()) EXPECT_TRUE(before[i][p].equal(arguments.device_params[i][p])) << error;
    }
  }
  return error;
}

TEST(TrainBatch, RefusesBadLearningRates) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto& [lr, text] : {std::pair{-0.1, "not -0.1"}, {std::nan(""), "not nan"}, {infinity, "not inf"}}) {
    const double given = lr;
    EXPECT_THAT(refusal([&](Arguments& a) { a.lr = given; }), Refused());
  }
}

TEST(TrainBatch, RefusesBadBatches) {
  EXPECT_THAT(refusal([](Arguments& a) { a.y = a.y.slice(0, 0, 3); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.y = a.y.to(torch::kFloat); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.y = a.y.view({4, 1}); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.x = a.x.to(torch::kByte); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.x = a.x.squeeze(1); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.x = torch::Tensor(); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.y = torch::Tensor(); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) {
                a.x = a.x.slice(0, 0, 0);
                a.y = a.y.slice(0, 0, 0);
              }),
              Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.y[3] = 10; }), Fails(Error::user_code));
}

TEST(TrainBatch, RefusesBadLists) {
  EXPECT_THAT(refusal([](Arguments& a) { a.devices.clear(); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.devices.push_back(cpu); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.device_params[1].pop_back(); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.device_params = {{}, {}}; }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.devices[1] = c10::Device("cuda:0"); }), Refused());
}

TEST(TrainBatch, RefusesBadParameters) {
  EXPECT_THAT(refusal([](Arguments& a) { a.device_params[1][3] = torch::zeros({50}); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.device_params[1][3] = torch::Tensor(); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.device_params[1][1] = torch::zeros({3}).requires_grad_(); }), Refused());
  EXPECT_THAT(refusal([](Arguments& a) { a.device_params[1] = a.device_params[0]; }), Refused());
}

TEST(TrainBatch, RefusesALossThatIsNotOneNumber) {
  auto device_params = copies_of(shared_mlp(2), 2);
  const auto call = [&](const SumOfLosses& loss) {
    return error_of([&] {
      train_batch(torch::ones({4, 2}, torch::kDouble), torch::zeros({4}), device_params, Devices(2, cpu), 0.1, loss);
    });
  };
  EXPECT_THAT(call([](const auto& x, const auto&, const auto& p) { return x.matmul(p[0]).sum(1); }), Refused());
  EXPECT_THAT(call([](const auto&, const auto&, const auto&) { return torch::Tensor(); }), Refused());
}

ImageData small_images() {
  return synthetic_images(/*train_size=*/300, /*test_size=*/90, /*seed=*/1);
}

// The section's train(), without its test set: the mean loss of each epoch.
std::vector<double> losses_of_epochs(int num_devices, int64_t batch_size, double lr, const ImageData& data, int epochs,
                                     uint64_t seed = 0) {
  const Devices devices = try_gpus(num_devices);
  std::vector<std::vector<torch::Tensor>> device_params;
  const auto params = lenet_params(seed);
  for (const auto& device : devices) device_params.push_back(get_params(params, device));
  std::vector<double> losses;
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    double sum = 0;
    for (auto& batch : batches(data.train, {.size = batch_size, .seed = seed, .epoch = epoch})) {
      sum += train_batch(batch.x, batch.y, device_params, devices, lr) * static_cast<double>(batch.size());
    }
    losses.push_back(sum / static_cast<double>(data.train.size()));
  }
  return losses;
}

TEST(TrainBatchOverEpochs, GivesTheSameCurveOverAnyNumberOfDevices) {
  const auto data = small_images();
  const auto alone = losses_of_epochs(1, 64, 0.2, data, 2);
  for (int devices = 2; devices <= 3; ++devices) {
    const auto losses = losses_of_epochs(devices, 64, 0.2, data, 2);
    for (size_t epoch = 0; epoch < 2; ++epoch) EXPECT_NEAR(losses[epoch], alone[epoch], 1e-4);
  }
}

TEST(TrainBatchOverEpochs, BeginsAtTheLossOfAGuess) {
  EXPECT_NEAR(losses_of_epochs(2, 32, 0.1, small_images(), 1)[0], std::log(10.0), 0.05);  // so small weights guess
}

TEST(TrainBatchOverEpochs, RepeatsWithTheSameSeedAndDiffersWithAnother) {
  const auto data = small_images();
  const auto once = losses_of_epochs(2, 32, 0.2, data, 1, 5);
  EXPECT_EQ(losses_of_epochs(2, 32, 0.2, data, 1, 5), once);
  EXPECT_NE(losses_of_epochs(2, 32, 0.2, data, 1, 6), once);
}

}  // namespace train_batch_test
}  // namespace lockstep
