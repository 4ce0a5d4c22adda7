// Labels: concurrency arithmetic 3x3 2x4
// SyncBatchNorm over 1 to 4 CPU ranks, against LibTorch's BatchNorm on the whole batch.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/nn/layer_holder.hpp>

#include "support/group_tests.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace sync_batch_norm_test {

using testing::ElementsAre;
using torch::Tensor;
using torch::nn::BatchNormOptions;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr double kTolerance = 1e-10;

using SyncBatchNormWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, SyncBatchNormWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// A rank's samples: even as can be, or none for rank 0 if there are others.
Tensor part_for(const Tensor& whole, const Rank& rank, bool none_for_first) {
  if (!none_for_first || rank.world_size() == 1) return slice_of(whole, 0, rank);
  if (rank.index() == 0) return whole.detach().narrow(0, 0, 0).clone().to(rank.device());
  const Range part = part_of(whole.size(0), rank.index() - 1, rank.world_size() - 1);
  return whole.detach().narrow(0, part.begin, part.size()).clone().to(rank.device());
}

// A layer at its start, and the same after three steps on one device, on whole batches.
template <class BatchNorm>
struct Steps {
  Steps(const BatchNormOptions& options, std::vector<int64_t> shape) : start(options), trained(options) {
    const auto doubles = [](at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); };
    start->to(torch::kDouble);
    for (auto& parameter : start->parameters()) parameter.set_data(doubles(parameter.sizes()));
    trained = std::dynamic_pointer_cast<typename BatchNorm::ContainedType>(start->clone());
    for (int step = 0; step < 3; ++step) {
      xs.push_back((doubles(shape) * 3 + step).requires_grad_());
      gradients.push_back(doubles(shape));
      ys.push_back(trained->forward(xs.back()));
      ys.back().backward(gradients.back());
    }
  }

  BatchNorm start, trained;
  std::vector<Tensor> xs, gradients, ys;
};

// Outputs, gradients, running statistics, and the evaluation.
template <class BatchNorm>
void expect_the_same(const Steps<BatchNorm>& steps, bool none_for_first, const std::string& name, Rank& rank) {
  SyncBatchNorm sync(*std::dynamic_pointer_cast<typename BatchNorm::ContainedType>(steps.start->clone()), rank);
  sync->to(rank.device());
  for (size_t step = 0; step < steps.xs.size(); ++step) {
    const Tensor x = part_for(steps.xs[step], rank, none_for_first).requires_grad_();
    const Tensor y = sync->forward(x);
    y.backward(part_for(steps.gradients[step], rank, none_for_first));
    expect_near(y.detach(), part_for(steps.ys[step], rank, none_for_first), kTolerance, name + ": y");
    expect_near(x.grad(), part_for(steps.xs[step].grad(), rank, none_for_first), kTolerance, name + ": dx");
  }
  for (const auto& item : sync->named_parameters()) {
    rank.allreduce(item.value().grad());
    expect_near(item.value().grad(), steps.trained->named_parameters()[item.key()].grad(), kTolerance,
                name + item.key());
  }
  for (const auto& item : sync->named_buffers()) {
    const Tensor expected = steps.trained->named_buffers()[item.key()];
    expect_near(item.value().to(torch::kDouble), expected.to(torch::kDouble), kTolerance, name + item.key());
    expect_equal_on_all_ranks(item.value(), rank, name + item.key());
  }
  if (!sync->options.track_running_stats()) return;
  sync->eval();
  const auto whole = std::dynamic_pointer_cast<typename BatchNorm::ContainedType>(steps.trained->clone());
  whole->eval();
  const Tensor x = steps.xs[0].detach();
  expect_near(sync->forward(x.to(rank.device())).detach(), whole->forward(x).detach(), kTolerance,
              name + ": in eval mode");
}

template <class BatchNorm>
void expect_whole_batches(int ranks, std::vector<int64_t> shape, const BatchNormOptions& options) {
  for (const int64_t samples : {9, 2}) {  // with 2 samples some ranks have none
    shape[0] = samples;
    const Steps<BatchNorm> steps(options, shape);
    for (const bool none_for_first : {false, true}) {
      const auto name =
          c10::str("x ", shape, none_for_first ? ", none for the first of " : ", parts for ", ranks, ": ");
      run(test_devices(ranks), [&](Rank& rank) { expect_the_same(steps, none_for_first, name, rank); });
    }
  }
}

TEST_P(SyncBatchNormWorlds, LayerIsTheBatchNormOfTheWholeBatch) {
  const BatchNormOptions plain(3);
  expect_whole_batches<nn::BatchNorm1d>(GetParam(), {0, 3}, plain);
  expect_whole_batches<nn::BatchNorm1d>(GetParam(), {0, 3, 4}, plain);
  expect_whole_batches<nn::BatchNorm2d>(GetParam(), {0, 3, 2, 5}, plain);
  expect_whole_batches<nn::BatchNorm3d>(GetParam(), {0, 3, 2, 1, 3}, plain);
  expect_whole_batches<nn::BatchNorm2d>(GetParam(), {0, 3, 2, 5}, BatchNormOptions(3).momentum(std::nullopt));
  expect_whole_batches<nn::BatchNorm2d>(GetParam(), {0, 3, 2, 5}, BatchNormOptions(3).affine(false).eps(1e-3));
  expect_whole_batches<nn::BatchNorm1d>(GetParam(), {0, 3, 4}, BatchNormOptions(3).track_running_stats(false));
}

// A user's module that holds layers.
struct HolderImpl : nn::Cloneable<HolderImpl> {
  HolderImpl() { reset(); }
  void reset() override { layers = register_module("layers", nn::Sequential(nn::Conv2d(4, 4, 2), nn::BatchNorm2d(4))); }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers{nullptr};
};
TORCH_MODULE(Holder);

// Two convolutions beside a short cut, which has layers of its own if shapes change.
struct BlockImpl : nn::Cloneable<BlockImpl>, LayerHolder {
  BlockImpl(int64_t in, int64_t out, int64_t stride = 1) : in(in), out(out), stride(stride) { reset(); }
  void reset() override {
    const auto convolution = [](int64_t in, int64_t out, int64_t kernel, int64_t stride) {
      return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2));
    };
    conv1 = register_module("conv1", convolution(in, out, 3, stride));
    conv2 = register_module("conv2", convolution(out, out, 3, 1));
    for (auto* norm : {&norm1, &norm2}) {
      *norm = norm->is_empty() ? nn::AnyModule(nn::BatchNorm2d(out)) : norm->clone();
      register_module(norm == &norm1 ? "norm1" : "norm2", norm->ptr());
    }
    shortcut = register_module("shortcut", nn::Sequential());
    if (stride == 1 && in == out) return;
    shortcut->push_back(convolution(in, out, 1, stride));
    shortcut->push_back(nn::BatchNorm2d(out));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = norm2.forward(conv2(torch::relu(norm1.forward(conv1(x)))));
    return torch::relu(y + (shortcut->is_empty() ? x : shortcut->forward(x)));
  }
  nn::AnyModule& layer(const std::string& name) override { return name == "norm1" ? norm1 : norm2; }
  int64_t in, out, stride;
  nn::Conv2d conv1{nullptr}, conv2{nullptr};
  nn::AnyModule norm1, norm2;
  nn::Sequential shortcut{nullptr};
};
TORCH_MODULE(Block);

// BatchNorms at several depths, of several kinds.
nn::Sequential make_net() {
  nn::Sequential net(nn::Conv2d(2, 4, 2), nn::BatchNorm2d(nn::BatchNormOptions(4).momentum(std::nullopt)), nn::ReLU(),
                     Holder(), Block(4, 4), Block(4, 6, 2), nn::AdaptiveAvgPool2d(1), nn::Flatten(), nn::BatchNorm1d(6),
                     nn::Linear(6, 3));
  net->to(torch::kDouble);
  return net;
}

nn::Sequential copy_of(const nn::Sequential& net) {
  return {std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone())};
}

// With many small buckets, whose exchanges come between those of the layers.
TEST_P(SyncBatchNormWorlds, NetsTrainAsOnOneDeviceAlsoWithEmptyParts) {
  const nn::Sequential start = make_net();
  nn::Sequential single = copy_of(start);
  torch::optim::SGD sgd(single->parameters(), /*lr=*/0.1);
  std::vector<Batch> batches;
  std::vector<std::vector<Tensor>> gradients;
  for (const int64_t size : {7, 5, 3, 2}) {  // some ranks have none of 2 and 3 samples
    batches.push_back({torch::randn({size, 2, 6, 6}, torch::kDouble), torch::randint(3, {size}), size});
    sgd.zero_grad();
    F::cross_entropy(single->forward(batches.back().x), batches.back().y).backward();
    gradients.emplace_back();
    for (const auto& parameter : single->parameters()) gradients.back().push_back(parameter.grad().clone());
    sgd.step();
  }
  on_ranks([&](Rank& rank) {
    nn::Sequential layers = copy_of(start);
    EXPECT_EQ(convert_sync_batchnorm(*layers, rank), 8);
    DataParallel net(layers, rank, {.bucket_bytes = 64, .first_bucket_bytes = 64});
    torch::optim::SGD own_sgd(net->parameters(), /*lr=*/0.1);
    for (size_t step = 0; step < batches.size(); ++step) {
      const Batch& whole = batches[step];
      const bool none_for_first = step % 2 == 1;
      own_sgd.zero_grad();
      const Batch batch{part_for(whole.x, rank, none_for_first), part_for(whole.y, rank, none_for_first),
                        whole.global_size};
      auto loss = net.loss(batch, F::cross_entropy);
      EXPECT_TRUE(batch.size() > 0 || loss.item() == 0);
      loss.backward();
      for (size_t i = 0; i < gradients[step].size(); ++i) {
        expect_near(net->parameters()[i].grad(), gradients[step][i], kTolerance, c10::str("step ", step, ", ", i));
      }
      own_sgd.step();
    }
    for (const auto& item : net->named_buffers()) {
      const Tensor expected = single->named_buffers()[item.key()];
      expect_near(item.value().to(torch::kDouble), expected.to(torch::kDouble), kTolerance, item.key());
    }
  });
}

TEST(SyncBatchNorm, ConversionKeepsTensorsOptionsAndMode) {
  run(test_devices(2), [](Rank& rank) {
    nn::Sequential net(Holder(), Block(4, 6, 2), nn::BatchNorm2d(BatchNormOptions(6).momentum(0.3).eps(0.01)),
                       nn::BatchNorm2d(BatchNormOptions(6).affine(false).track_running_stats(false)));
    net->train(rank.index() == 0);
    const auto parameters = net->named_parameters(), buffers = net->named_buffers();
    EXPECT_FALSE(has_sync_batchnorm(*net));
    EXPECT_EQ(convert_sync_batchnorm(*net, rank), 6);
    EXPECT_TRUE(has_sync_batchnorm(*net));
    EXPECT_EQ(convert_sync_batchnorm(*net, rank), 0);  // nothing is left
    const auto after = net->named_parameters(), buffers_after = net->named_buffers();
    EXPECT_EQ(after.keys(), parameters.keys());
    EXPECT_EQ(buffers_after.keys(), buffers.keys());
    for (const auto& item : parameters) EXPECT_TRUE(item.value().is_same(after[item.key()])) << item.key();
    for (const auto& item : buffers) EXPECT_TRUE(item.value().is_alias_of(buffers_after[item.key()])) << item.key();
    for (const auto& module : net->modules()) EXPECT_EQ(module->is_training(), rank.index() == 0);
    const auto& sync = dynamic_cast<const SyncBatchNormImpl&>(*net->ptr(2));
    EXPECT_EQ(sync.options.momentum(), 0.3);
    EXPECT_EQ(sync.options.eps(), 0.01);
    net->to(torch::kDouble);
    net->train();
    auto clone = copy_of(net);  // the clone has the synchronised kind in all places too
    EXPECT_EQ(clone->named_parameters().keys(), parameters.keys());
    const Tensor x = torch::ones({3, 4, 8, 8}, torch::kDouble) * rank.index();
    EXPECT_TRUE(clone->forward(x).equal(net->forward(x)));
    EXPECT_EQ(convert_sync_batchnorm(*clone, rank), 0);
  });
}

TEST(SyncBatchNorm, ConversionRefusesWhatCannotBeReplacedBeforeItChangesAnything) {
  struct OwnMember : nn::Module {
    nn::Sequential layers = register_module("layers", nn::Sequential(nn::BatchNorm1d(2)));
    nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(2));
  };
  run(test_devices(1), [](Rank& rank) {
    OwnMember module;
    EXPECT_THAT(error_of([&] { convert_sync_batchnorm(module, rank); }), Refused());
    EXPECT_FALSE(has_sync_batchnorm(module));
    nn::BatchNorm2d alone(3);
    EXPECT_THAT(error_of([&] { convert_sync_batchnorm(*alone, rank); }), Refused());
  });
}

// Sums of squares would have lost all digits of the variance.
TEST(SyncBatchNorm, LargeMeansCostNoDigitsOfTheVariance) {
  torch::manual_seed(1);
  const Tensor whole = torch::randn({64, 2, 8, 8}) + 1e4;
  const Tensor variance = whole.to(torch::kDouble).var({0, 2, 3}, /*unbiased=*/true);
  run(test_devices(3), [&](Rank& rank) {
    SyncBatchNorm norm(BatchNormOptions(2).momentum(1.0), rank);
    norm->to(rank.device());
    norm->forward(slice_of(whole, 0, rank));
    expect_near(norm->running_var.to(torch::kDouble), variance, 1e-4, "the variance");
  });
}

TEST(SyncBatchNorm, ComputesHalfPrecisionWithStatisticsInFloat32) {
  torch::manual_seed(2);
  const Tensor whole = torch::randn({8, 3, 4}).to(torch::kBFloat16), gradient = torch::randn({8, 3, 4});
  const Tensor x = whole.to(torch::kFloat).requires_grad_();
  nn::BatchNorm1d expected(3);
  const Tensor y = expected->forward(x);
  y.backward(gradient);
  run(test_devices(2), [&](Rank& rank) {
    SyncBatchNorm norm(BatchNormOptions(3), rank);
    norm->to(rank.device());
    const Tensor own_x = slice_of(whole, 0, rank).requires_grad_();
    const Tensor own_y = norm->forward(own_x);
    EXPECT_EQ(own_y.scalar_type(), torch::kBFloat16);
    own_y.backward(slice_of(gradient, 0, rank).to(torch::kBFloat16));
    expect_near(own_y.detach().to(torch::kFloat), slice_of(y, 0, rank), 0.01, "y");
    expect_near(own_x.grad().to(torch::kFloat), slice_of(x.grad(), 0, rank), 0.02, "dx");
    expect_near(norm->running_var, expected->running_var, 1e-6, "the running variance");
  });
}

TEST(SyncBatchNorm, MakesOneExchangeInForwardAndOneInBackward) {
  run(test_devices(2), [](Rank& rank) {
    const auto calls = std::make_shared<CountingBackend::Calls>();
    Rank counting = counted(rank, calls);
    SyncBatchNorm norm(BatchNormOptions(3), counting);
    norm->to(rank.device());
    const Tensor x = torch::ones({2, 3}, rank.device()).requires_grad_();
    norm->forward(x).sum().backward();
    norm->eval();
    norm->forward(x).sum().backward();
    EXPECT_THAT(*calls, ElementsAre("allgather", "allreduce"));
  });
}

// Whether the weight, save_mean and save_invstd were given, for each call of native_batch_norm_backward on this thread.
std::vector<bool>& given() {
  thread_local std::vector<bool> seen;
  return seen;
}

// The CPU's kernel does not read them where x's gradient is not asked for. CUDA's does, and throws without them.
TEST(SyncBatchNorm, GivesItsBackwardWhatCudasKernelReads) {
  run(test_devices(2), [](Rank& rank) {
    given().clear();
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          if (call.name() != std::string("aten::native_batch_norm_backward")) return nullptr;
          for (const size_t input : {2, 5, 6}) {
            const c10::IValue& value = call.inputs().at(input);
            given().push_back(value.isTensor() && value.toTensor().defined());
          }
          return nullptr;
        })
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
    SyncBatchNorm norm(BatchNormOptions(3), rank);
    norm->forward(torch::randn({4, 3})).pow(2).sum().backward();
    at::removeCallback(handle);
    EXPECT_THAT(given(), ElementsAre(true, true, true)) << rank.name();
  });
}

TEST(SyncBatchNorm, SaysWhatItCannotCompute) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               SyncBatchNorm norm(BatchNormOptions(3), rank);
                               norm->forward(torch::ones({1 - rank.index(), 3}));  // one sample of all ranks
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [](Rank& rank) {
                               SyncBatchNorm norm(BatchNormOptions(3), rank);
                               norm->forward(torch::ones({2, 4}));
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [](Rank& rank) {
                               SyncBatchNorm norm(BatchNormOptions(3), rank);
                               const Tensor x = torch::randn({4, 3}).requires_grad_();
                               torch::autograd::grad({norm->forward(x).pow(2).sum()}, {x}, {}, std::nullopt,
                                                     /*create_graph=*/true);
                             }),
              Refused());
}

}  // namespace sync_batch_norm_test
}  // namespace lockstep
