// Not under sanitizers: Models.Learn
// The models: sizes that the book and the papers give, weights from the seed alone, layers by name, and that they
// learn.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

#include <cmath>
#include <limits>
#include <thread>

namespace lockstep {
namespace models_test {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

int64_t number_of_parameters(const torch::nn::Module& net) {
  int64_t sum = 0;
  for (const auto& parameter : net.parameters()) sum += parameter.numel();
  return sum;
}

// Each model, small enough for a test.
std::vector<ModelOptions> small_models() {
  return {{.name = "lenet"},  // without dropout, which outside of run() draws as LibTorch's
          {.name = "mlp", .width = 0.125},
          {.name = "alexnet", .width = 0.1, .image_size = 65, .dropout = 0},
          {.name = "alexnet", .width = 0.1, .image_size = 65, .groups = 2, .dropout = 0},
          {.name = "resnet18", .width = 0.125},
          {.name = "resnet18", .width = 0.125, .image_size = 9}};
}

TEST(Models, HaveAsManyParametersAsThePapersSay) {
  // 20·9 + 20,  50·20·25 + 50,  800·128 + 128,  128·10 + 10
  EXPECT_EQ(number_of_parameters(*LeNet()), 200 + 25'050 + 102'528 + 1'290);
  // 784·512 + 512,  five of 512·512 + 512,  512·10 + 10
  EXPECT_EQ(number_of_parameters(*Mlp()), 401'920 + 5 * 262'656 + 5'130);
  // 96·121 + 96,  256·96·25 + 256,  384·256·9 + 384,  384·384·9 + 384,  256·384·9 + 256, and of 256·5·5 values
  // 6400·4096 + 4096,  4096·4096 + 4096,  4096·10 + 10
  const int64_t alexnet = 11'712 + 614'656 + 885'120 + 1'327'488 + 884'992 + 26'218'496 + 16'781'312 + 40'970;
  EXPECT_EQ(alexnet, 46'764'746);
  EXPECT_EQ(number_of_parameters(*AlexNet()), alexnet);
  // Half of the second, fourth and fifth kernels: 256·48·25, 384·192·9 and 256·192·9 less.
  EXPECT_EQ(number_of_parameters(*AlexNet(AlexNetOptions{.groups = 2})), alexnet - 307'200 - 663'552 - 442'368);
  // 9·64 and its norm; two blocks of 64; 128: one that halves (64·128·9 + 128·128·9 and two norms, 64·128 and a norm
  // beside) and one that does not; 256; 512; 512·10 + 10.
  EXPECT_EQ(number_of_parameters(*ResNet18()),
            704 + 2 * 73'984 + (230'144 + 295'424) + (919'040 + 1'180'672) + (3'673'088 + 4'720'640) + 5'130);
  // Three channels: 2·9·64 more; 1000 classes: 990·513 more.
  EXPECT_EQ(number_of_parameters(*ResNet18(ResNet18Options{.in_channels = 3, .classes = 1000})),
            11'172'810 + 2 * 9 * 64 + 990 * 513);
}

TEST(Models, HaveNamedLayers) {
  const auto names = [](const torch::nn::Module& net) { return net.named_children().keys(); };
  EXPECT_THAT(names(*LeNet()), ElementsAre("conv1", "conv2", "flatten", "fc1", "relu", "fc2"));
  EXPECT_THAT(names(*Mlp(MlpOptions{.inputs = 4, .hidden = {3, 2}})),
              ElementsAre("flatten", "fc1", "relu1", "fc2", "relu2", "output"));
  EXPECT_THAT(
      names(*AlexNet(AlexNetOptions{.width = 0.1})),
      ElementsAre("resize", "conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "conv3", "relu3", "conv4", "relu4",
                  "conv5", "relu5", "pool5", "flatten", "fc6", "relu6", "dropout6", "fc7", "relu7", "dropout7", "fc8"));
  EXPECT_THAT(names(*make_model({.name = "alexnet", .width = 0.1})), testing::Contains("dropout7"));
  EXPECT_THAT(names(*make_model({.name = "alexnet", .width = 0.1, .dropout = 0})),
              Each(testing::Not(HasSubstr("dropout"))));
  const ResNet18 resnet(ResNet18Options{.width = 0.125});
  EXPECT_THAT(names(*resnet), ElementsAre("conv1", "norm1", "relu", "block1", "block2", "block3", "block4", "block5",
                                          "block6", "block7", "block8", "pool", "flatten", "fc"));
  EXPECT_EQ(names(*make_model({.name = "resnet18", .width = 0.125, .image_size = 32}))[0], "resize");
  EXPECT_THAT(resnet->named_parameters().keys(),
              testing::IsSupersetOf({"conv1.weight", "block3.conv1.weight", "block3.norm2.bias",
                                     "block3.shortcut.0.weight", "block3.shortcut.1.weight", "fc.bias"}));
}

TEST(Models, ComputeLogitsAndFiniteGradientsInFloatAndDouble) {
  torch::manual_seed(1);
  for (const auto& options : small_models()) {
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      SCOPED_TRACE(to_string(options) + ", " + c10::toString(type));
      auto net = make_model(options);
      net->to(type);
      const torch::Tensor logits = net->forward(torch::rand({9, 1, 28, 28}, type));
      ASSERT_EQ(logits.sizes(), at::IntArrayRef({9, 10}));
      EXPECT_EQ(logits.scalar_type(), type);
      torch::nn::functional::cross_entropy(logits, torch::arange(9)).backward();
      for (const auto& item : net->named_parameters()) {
        ASSERT_TRUE(item.value().grad().defined()) << item.key();
        EXPECT_TRUE(item.value().grad().isfinite().all().item<bool>()) << item.key();
        EXPECT_GT(item.value().grad().abs().max().item<double>(), 0) << item.key();
      }
      net->eval();
      EXPECT_TRUE(net->forward(torch::rand({1, 1, 28, 28}, type)).isfinite().all().item<bool>());
    }
  }
}

TEST(Models, ComputeTheSameInChannelsLast) {
  torch::manual_seed(4);
  const torch::Tensor x = torch::rand({9, 1, 28, 28}, torch::kDouble), y = torch::arange(9);
  for (const auto& options : small_models()) {
    SCOPED_TRACE(to_string(options));
    auto net = make_model(options), other = make_model(options);
    net->to(torch::kDouble);
    other->to(torch::kDouble);
    set_memory_format(*other, at::MemoryFormat::ChannelsLast);
    const torch::Tensor logits = net->forward(x);
    const torch::Tensor same = other->forward(x.contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_TRUE(same.allclose(logits, 1e-10, 1e-10));
    torch::nn::functional::cross_entropy(logits, y).backward();
    torch::nn::functional::cross_entropy(same, y).backward();
    const auto parameters = net->named_parameters();
    for (const auto& item : other->named_parameters()) {
      EXPECT_TRUE(item.value().grad().allclose(parameters[item.key()].grad(), 1e-8, 1e-10)) << item.key();
    }
  }
}

void expect_equal_state(const torch::nn::Module& a, const torch::nn::Module& b, bool equal = true) {
  const auto state = [](const torch::nn::Module& net) {
    auto all = net.named_parameters();
    all.update(net.named_buffers());
    return all;
  };
  const auto mine = state(a), theirs = state(b);
  ASSERT_EQ(mine.keys(), theirs.keys());
  bool same = true;
  for (const auto& item : mine) same = same && item.value().equal(theirs[item.key()]);
  EXPECT_EQ(same, equal);
}

TEST(Models, WeightsDependOnTheSeedAlone) {
  const auto options = small_models();
  for (size_t i = 0; i < options.size(); ++i) {
    SCOPED_TRACE(to_string(options[i]));
    const auto first = make_model(options[i], /*seed=*/7);
    torch::manual_seed(99);
    torch::nn::Sequential second = nullptr, third = nullptr;
    std::thread one([&] { second = make_model(options[i], 7); }), two([&] { third = make_model(options[i], 7); });
    one.join();
    two.join();
    expect_equal_state(*first, *second);
    expect_equal_state(*first, *third);
    expect_equal_state(*first, *make_model(options[i], 8), /*equal=*/false);
  }
}

TEST(Models, StartWithXaviersWeightsAndZeroBiases) {
  const Mlp net(MlpOptions{.inputs = 30, .hidden = {20}, .seed = 5});
  torch::manual_seed(5);
  const double bound = std::sqrt(6.0 / (30 + 20));
  EXPECT_TRUE(net->parameters()[0].equal(torch::empty({20, 30}).uniform_(-bound, bound)));

  const auto alexnet = make_model({.name = "alexnet", .width = 0.5, .image_size = 65})->named_parameters();
  const double conv_bound = std::sqrt(6.0 / ((48 + 128) * 25));  // [128, 48, 5, 5]
  const double largest = alexnet["conv2.weight"].abs().max().item<double>();
  EXPECT_LE(largest, conv_bound);
  EXPECT_GT(largest, 0.999 * conv_bound);
  for (const auto& item : alexnet) {
    if (item.key().ends_with("bias")) EXPECT_EQ(item.value().count_nonzero().item<int64_t>(), 0) << item.key();
  }
  const auto resnet = make_model({.name = "resnet18", .width = 0.125})->named_parameters();
  EXPECT_TRUE(resnet["block1.norm1.weight"].equal(torch::ones({8})));
  EXPECT_TRUE(resnet["block1.norm1.bias"].equal(torch::zeros({8})));
}

TEST(Models, WidthsGiveMultiplesOfEight) {
  const auto alexnet = make_model({.name = "alexnet", .width = 0.25, .image_size = 96})->named_parameters();
  EXPECT_EQ(alexnet["conv1.weight"].sizes(), at::IntArrayRef({24, 1, 11, 11}));
  EXPECT_EQ(alexnet["conv4.weight"].sizes(), at::IntArrayRef({96, 96, 3, 3}));
  EXPECT_EQ(alexnet["fc6.weight"].sizes(), at::IntArrayRef({1024, 64}));  // 64 channels of one pixel
  for (const double width : {0.001, 0.13, 0.3}) {
    for (const char* name : {"mlp", "alexnet", "resnet18"}) {
      const auto net = make_model({.name = name, .width = width});
      const auto parameters = net->parameters();
      for (size_t i = 0; i + 2 < parameters.size(); ++i) EXPECT_EQ(parameters[i].size(0) % 8, 0) << name;
      EXPECT_EQ(parameters.back().size(0), 10);
    }
  }
}

TEST(AlexNet, TwoTowersMeetInTheThirdConvolution) {
  auto net = make_model({.name = "alexnet", .width = 0.1, .image_size = 65, .groups = 2});
  torch::Tensor x = torch::rand({2, 8, 7, 7}), changed = x.clone();
  changed.narrow(1, 4, 4).add_(1);  // the second tower's
  const auto differences = [&](const char* name) {
    auto conv = std::dynamic_pointer_cast<torch::nn::Conv2dImpl>(net->named_children()[name]);
    x = conv->forward(x);
    changed = conv->forward(changed);
    return (x - changed).abs().amax({0, 2, 3}) > 1e-6;
  };
  const torch::Tensor second = differences("conv2");
  const int64_t half = second.numel() / 2;
  EXPECT_FALSE(second.narrow(0, 0, half).any().item<bool>());
  EXPECT_TRUE(second.narrow(0, half, half).all().item<bool>());
  EXPECT_TRUE(differences("conv3").all().item<bool>());
}

TEST(AlexNet, ResizesImagesAsInterpolateDoes) {
  torch::manual_seed(2);
  AlexNet net(AlexNetOptions{.in_channels = 3, .classes = 4, .width = 0.05, .image_size = 70});
  net->eval();  // without dropout
  const torch::Tensor x = torch::rand({2, 3, 28, 31});
  namespace F = torch::nn::functional;
  const auto large = F::interpolate(
      x, F::InterpolateFuncOptions().size(std::vector<int64_t>{70, 70}).mode(torch::kBilinear).align_corners(false));
  const torch::Tensor logits = net->forward(x);
  EXPECT_EQ(logits.sizes(), at::IntArrayRef({2, 4}));
  EXPECT_TRUE(logits.equal(net->forward(large)));
  EXPECT_FALSE(logits[0].equal(logits[1]));
}

TEST(Models, Learn) {
  const Dataset data = synthetic_images(24, 1).train;
  const torch::Tensor x = data.x.to(torch::kFloat) / 255;
  for (const auto& options : small_models()) {
    if (options.name == "lenet") continue;  // rests for some 200 steps; trainer_test has it
    SCOPED_TRACE(to_string(options));
    auto net = make_model(options);
    torch::optim::Adam adam(net->parameters(), 3e-3);  // Adam makes more of few steps than plain SGD
    double first = 0, last = 0;
    for (int step = 0; step < 60; ++step) {
      adam.zero_grad();
      const torch::Tensor loss = torch::nn::functional::cross_entropy(net->forward(x), data.y);
      loss.backward();
      adam.step();
      last = loss.item<double>();
      if (step == 0) first = last;
    }
    EXPECT_NEAR(first, std::log(10), 1.0);
    EXPECT_LT(last, 0.7 * first);
  }
}

TEST(Models, CheckpointsComeBack) {
  const ScratchFolder folder;
  torch::manual_seed(3);
  const torch::Tensor x = torch::rand({8, 1, 28, 28});
  for (const auto& options : small_models()) {
    SCOPED_TRACE(to_string(options));
    auto net = make_model(options, /*seed=*/1);
    net->forward(x);  // changes BatchNorm's buffers
    save_weights(folder / "weights", *net);
    auto other = make_model(options, /*seed=*/2);
    load_weights(folder / "weights", *other);
    expect_equal_state(*net, *other);
    net->eval();
    other->eval();
    EXPECT_TRUE(net->forward(x).equal(other->forward(x)));
  }
}

TEST(Models, ClonesKeepNamesAndModeAndShareNothing) {
  const torch::Tensor x = torch::rand({8, 1, 28, 28});
  for (const auto& options : small_models()) {
    SCOPED_TRACE(to_string(options));
    auto net = make_model(options, /*seed=*/1);
    net->forward(x);
    net->eval();
    const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
    ASSERT_NE(clone, nullptr);
    EXPECT_EQ(clone->named_children().keys(), net->named_children().keys());
    expect_equal_state(*net, *clone);
    EXPECT_FALSE(clone->is_training());
    EXPECT_TRUE(clone->forward(x).equal(net->forward(x)));
    const torch::Tensor before = net->forward(x);
    {
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : clone->parameters()) parameter.zero_();
      for (const auto& buffer : clone->buffers()) buffer.zero_();
    }
    EXPECT_TRUE(net->forward(x).equal(before));
    EXPECT_EQ(clone->forward(x).count_nonzero().item<int64_t>(), 0);
    const auto again = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(clone->clone());
    EXPECT_EQ(again->named_children().keys(), net->named_children().keys());
  }
}

TEST(Models, RefuseWhatTheyDoNotHave) {
  const auto refused = [](const ModelOptions& options) {
    EXPECT_THAT(error_of([&] { make_model(options); }), Refused());
    return error_of([&] { check_model(options); });
  };
  EXPECT_THAT(refused({.name = "vgg"}), Refused());
  EXPECT_THAT(refused({.width = 2}), Refused());
  EXPECT_THAT(refused({.image_size = 28}), Refused());
  EXPECT_THAT(refused({.name = "mlp", .image_size = 28}), Refused());
  EXPECT_THAT(refused({.groups = 2}), Refused());
  EXPECT_THAT(refused({.dropout = 0.1}), Refused());
  EXPECT_THAT(refused({.name = "alexnet", .dropout = 1}), Refused());
  EXPECT_THAT(refused({.name = "mlp", .groups = 2}), Refused());
  EXPECT_THAT(refused({.name = "resnet18", .groups = 2}), Refused());
  EXPECT_THAT(refused({.name = "alexnet", .groups = 3}), Refused());
  for (const double width : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity(), 65.0}) {
    for (const char* name : {"mlp", "alexnet", "resnet18"}) {
      EXPECT_THAT(refused({.name = name, .width = width}), Refused());
    }
  }
  EXPECT_THAT(refused({.name = "alexnet", .image_size = 64}), Refused());
  EXPECT_THAT(refused({.name = "alexnet", .image_size = 5000}), Refused());
  EXPECT_THAT(refused({.name = "resnet18", .image_size = 8}), Refused());
  EXPECT_THAT(error_of([] { AlexNet(AlexNetOptions{.dropout = 1}); }), Refused());
  EXPECT_THAT(error_of([] { AlexNet(AlexNetOptions{.in_channels = 0}); }), Refused());
  EXPECT_THAT(error_of([] { ResNet18(ResNet18Options{.classes = 0}); }), Refused());
  EXPECT_THAT(error_of([] { Mlp(MlpOptions{.hidden = {4, 0}}); }), Refused());
}

TEST(Models, AreDescribedByWhatIsNotTheDefault) {
  EXPECT_EQ(to_string(ModelOptions()), "lenet");
  EXPECT_EQ(to_string(ModelOptions{.name = "alexnet", .width = 0.1, .image_size = 96, .groups = 2}),
            "alexnet, width 0.1, images of 96 x 96, 2 groups");
}

}  // namespace models_test
}  // namespace lockstep
