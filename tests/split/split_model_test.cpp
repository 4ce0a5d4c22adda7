// Labels: concurrency arithmetic 3x3 2x4
// SplitModel: over every mesh a net learns what it learns on one device.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/split/split_model.hpp>

#include "devices/memory_meter.hpp"
#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <random>
#include <string>
#include <vector>

namespace split_model_test {

using lockstep::Batch;
using lockstep::error_of;
using lockstep::ModelSplit;
using lockstep::PipelineSchedule;
using lockstep::Rank;
using lockstep::SplitModel;
using testing::AllOf;
using testing::HasSubstr;
using torch::Tensor;
using torch::nn::Sequential;

// Counts of channels and units divide by 2, 3 and 4.
Sequential make_net() {
  Sequential net;
  net->push_back("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 12, 3).padding(1)));
  net->push_back("tanh1", torch::nn::Tanh());
  net->push_back("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(12, 12, 3)));
  net->push_back("relu2", torch::nn::ReLU());
  net->push_back("flatten", torch::nn::Flatten());
  net->push_back("fc1", torch::nn::Linear(12 * 4 * 4, 24));
  net->push_back("tanh3", torch::nn::Tanh());
  net->push_back("fc2", torch::nn::Linear(24, 12));
  net->to(torch::kDouble);
  int64_t number = 0;  // weights that look random, the same on every thread
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    const Tensor values = (torch::arange(parameter.numel()) * 7919 + 31 * ++number) % 1009;
    parameter.copy_((values.to(torch::kDouble) / 1009 - 0.5).view(parameter.sizes()) / 2);
  }
  return net;
}

Batch make_batch(int64_t size, int step) {
  const Tensor values = (torch::arange(size * 36) * 6007 + 97 * step) % 997;
  return {(values.to(torch::kDouble) / 997).view({size, 1, 6, 6}), (torch::arange(size) * 5 + step) % 12, size};
}

Batch part_of(const Batch& batch, const Rank& rank) {
  const auto part = lockstep::part_of(batch.size(), rank.index(), rank.world_size());
  return {batch.x.slice(0, part.begin, part.end).to(rank.device()),
          batch.y.slice(0, part.begin, part.end).to(rank.device()), batch.global_size};
}

constexpr int steps = 3;
const std::vector<int64_t> sizes = {7, 3, 8};  // of the steps' global batches

// After some steps on one device: the losses, and the net.
std::pair<std::vector<double>, Sequential> train_whole() {
  auto net = make_net();
  torch::optim::SGD sgd(net->parameters(), /*lr=*/0.5);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = make_batch(sizes[step], step);
    sgd.zero_grad();
    const Tensor loss = torch::nn::functional::cross_entropy(net->forward(batch.x), batch.y);
    loss.backward();
    sgd.step();
    losses.push_back(loss.item<double>());
  }
  return {losses, net};
}

void expect_close(const Tensor& actual, const Tensor& expected, const std::string& what) {
  EXPECT_TRUE(torch::allclose(actual.cpu(), expected.cpu(), /*rtol=*/0, /*atol=*/1e-12))
      << what << " differs by " << (actual.cpu() - expected.cpu()).abs().max().item<double>();
}

void expect_trains_like_one_device(Rank& rank, const ModelSplit& split) {
  auto [losses, expected] = train_whole();
  SplitModel net(make_net(), rank, split);
  torch::optim::SGD sgd(net.parameters(), /*lr=*/0.5);
  auto& data = net.mesh().data();
  for (int step = 0; step < steps; ++step) {
    const Batch batch = part_of(make_batch(sizes[step], step), data);
    sgd.zero_grad();
    Tensor loss = net.forward_backward(batch, torch::nn::functional::cross_entropy) * double(batch.size());
    sgd.step();
    data.allreduce(loss);
    EXPECT_NEAR(loss.item<double>() / double(sizes[step]), losses[step], 1e-12);
    const auto stats = net.pipeline_stats();
    ASSERT_EQ(stats.has_value(), split.stages() > 1 || split.microbatches > 1);
    if (stats && batch.size() > 0 && rank.device().is_cpu()) EXPECT_GT(stats->computing, 0);
  }
  auto whole = make_net();
  net.gather(whole);
  const auto parameters = whole->named_parameters();
  for (const auto& item : expected->named_parameters()) expect_close(parameters[item.key()], item.value(), item.key());
  const Batch test = make_batch(5, 9);
  expect_close(net.forward(test.x.to(rank.device())), expected->forward(test.x).detach(), "the output");
}

class SplitModelWorlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, SplitModelWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& world) { return std::to_string(world.param) + "Ranks"; });

TEST_P(SplitModelWorlds, EveryMeshTrainsLikeOneDevice) {
  lockstep::run(lockstep::test_devices(GetParam()), [](Rank& rank) {
    for (const auto& mesh : lockstep::mesh_shapes(rank.world_size())) {
      SCOPED_TRACE(lockstep::to_string(mesh));
      expect_trains_like_one_device(rank, {.mesh = mesh});
      if (mesh.pipeline > 1) expect_trains_like_one_device(rank, {.mesh = mesh, .microbatches = 3});
    }
  });
}

TEST_P(SplitModelWorlds, SchedulesCutsAndRulesDoNotChangeTheResult) {
  lockstep::run(lockstep::test_devices(GetParam()), [](Rank& rank) {
    std::mt19937 random(7);  // the same on all ranks
    const auto meshes = lockstep::mesh_shapes(rank.world_size());
    for (int round = 0; round < 4; ++round) {
      ModelSplit split{
          .mesh = meshes[random() % meshes.size()],
          .schedule = PipelineSchedule::gpipe,
          .microbatches = 1 + int(random() % 4),
          .recompute = random() % 2 == 0,
          .tensor_rule = random() % 2 == 0 ? lockstep::TensorRule::channels : lockstep::TensorRule::alternating};
      if (split.mesh.pipeline == 2) {
        split.schedule = PipelineSchedule::interleaved;
        split.stages_per_rank = 2;
        split.cuts = {1, 3, 4 + int64_t(random() % 4)};
      }
      SCOPED_TRACE(lockstep::to_string(split.mesh) + ", round " + std::to_string(round));
      expect_trains_like_one_device(rank, split);
    }
  });
}

// The first microbatch's gradients go into the averaging's buckets, and the others add there.
TEST(SplitModelTest, MicrobatchesNeedTheirGradientsOnce) {
  constexpr int64_t layer_bytes = 512 * 512 * 4;
  const Batch batch{torch::randn({8, 512}), torch::randint(512, {8}), 8};
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    Sequential whole;
    for (int i = 0; i < 8; ++i) whole->push_back(torch::nn::Linear(512, 512));
    SplitModel net(whole, rank,
                   {.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::gpipe, .microbatches = 4, .cuts = {4}});
    net.forward_backward(batch, torch::nn::functional::cross_entropy);
    for (auto& parameter : net.parameters()) parameter.mutable_grad() = Tensor();  // as an optimizer's zero_grad does
    const lockstep::MemoryMeter meter;
    const int64_t before = meter.current();
    net.forward_backward(batch, torch::nn::functional::cross_entropy);
    EXPECT_LT(meter.peak() - before, 3 * layer_bytes) << "of four layers here";
  });
}

TEST(SplitModelTest, EvaluatesOnAllRanks) {
  auto expected = train_whole().second;
  const Batch all = make_batch(21, 4);
  const lockstep::Dataset images{(all.x * 255).to(torch::kUInt8), all.y};
  lockstep::Score score;
  lockstep::run({torch::kCPU}, [&](Rank& rank) {
    score =
        lockstep::evaluate([&](const Tensor& x) { return expected->forward(x.to(torch::kDouble)); }, images, rank, 8);
  });
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    for (const auto& mesh : lockstep::mesh_shapes(4)) {
      auto whole = make_net();
      {
        const torch::NoGradGuard no_grad;
        const auto values = expected->named_parameters();
        for (auto& item : whole->named_parameters()) item.value().copy_(values[item.key()]);
      }
      SplitModel net(whole, rank, {.mesh = mesh, .microbatches = 2});
      const auto here = lockstep::evaluate([&](const Tensor& x) { return net.forward(x.to(torch::kDouble)); }, images,
                                           net.mesh().data(), 8);
      EXPECT_EQ(here.correct, score.correct) << lockstep::to_string(mesh);
      EXPECT_EQ(here.total, 21);
      EXPECT_NEAR(here.loss, score.loss, 1e-6);
    }
  });
}

TEST(SplitModelTest, BackwardLeavesTheCallersAutocast) {
  lockstep::run({torch::kCPU}, [](Rank& rank) {
    for (const int microbatches : {1, 2}) {
      SplitModel net(make_net(), rank, {.microbatches = microbatches});
      std::vector<torch::ScalarType> products;  // types of matrix products, in forward and backward in turns
      const lockstep::Autocast bf16(rank.device());
      net.forward_backward(make_batch(4, 0), [&](const Tensor& y_hat, const Tensor& y) {
        const auto multiply = [&] {
          const Tensor ones = torch::ones({2, 2});
          products.push_back(ones.mm(ones).scalar_type());
        };
        const Tensor loss = torch::nn::functional::cross_entropy(y_hat, y);
        multiply();
        loss.register_hook([multiply](const Tensor&) { multiply(); });
        return loss;
      });
      ASSERT_EQ(products.size(), 2u * static_cast<size_t>(microbatches));
      for (size_t i = 0; i < products.size(); i += 2) {
        EXPECT_EQ(products[i], torch::kBFloat16);
        EXPECT_EQ(products[i + 1], torch::kFloat) << microbatches << " microbatches";
      }
    }
  });
}

std::string error_with_batches(
    const lockstep::MeshShape& mesh,
    const std::function<lockstep::Batches(const lockstep::Dataset&, Rank&, SplitModel&)>& make) {
  const Batch all = make_batch(16, 0);
  return error_of([&] {
    lockstep::run(lockstep::test_devices(mesh.data * mesh.pipeline * mesh.tensor), [&](Rank& rank) {
      SplitModel net(make_net(), rank, {.mesh = mesh});
      for (auto& batch : make({all.x, all.y}, rank, net))
        net.forward_backward(batch, torch::nn::functional::cross_entropy);
    });
  });
}

TEST(SplitModelTest, BatchesThatDifferWithinADataIndexAreRefused) {
  const auto of_another_seed = [](const lockstep::Dataset& data, Rank& rank, SplitModel& net) {
    return lockstep::batches(data, {.size = 8, .seed = rank.index() == 1 ? 1u : 0u}, net.mesh().data());
  };
  const auto of_another_size = [](const lockstep::Dataset& data, Rank& rank, SplitModel& net) {
    return lockstep::batches(data, {.size = rank.index() == 1 ? 7 : 8}, net.mesh().data());
  };
  EXPECT_THAT(error_with_batches({.tensor = 2}, of_another_seed),
              AllOf(HasSubstr("SplitModel: the ranks that split layers by channels pass different batches"),
                    HasSubstr("of another batch"), HasSubstr("the mesh's data axis")));
  EXPECT_THAT(error_with_batches({.tensor = 2}, of_another_size),
              testing::ContainsRegex("here [78] samples, at the group's rank [01] [78]"));
  // The first batches are alike.
  const auto of_fewer_samples = [](const lockstep::Dataset& data, Rank& rank, SplitModel& net) {
    const int64_t size = rank.index() == 1 ? 12 : 16;
    return lockstep::batches({data.x.slice(0, 0, size), data.y.slice(0, 0, size)}, {.size = 8}, net.mesh().data());
  };
  EXPECT_THAT(error_with_batches({.tensor = 2}, of_fewer_samples), HasSubstr("different batches"));
  EXPECT_THAT(error_with_batches({.pipeline = 2, .tensor = 2}, of_another_seed), HasSubstr("different batches"));
  EXPECT_THAT(error_with_batches({.pipeline = 2}, of_another_seed),
              HasSubstr("Pipeline: this rank's batch is another one"));
  EXPECT_THAT(error_with_batches({.pipeline = 2}, of_another_size), HasSubstr("the ranks' batches differ"));
}

// Batches of the user's own have no mark: their values tell.
TEST(SplitModelTest, OwnBatchesThatDifferWithinADataIndexAreRefused) {
  const auto error = [](const lockstep::MeshShape& mesh, bool trains, int shift) {
    const Batch all = make_batch(16, 0);
    return error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        SplitModel net(make_net(), rank, {.mesh = mesh, .microbatches = 2});
        for (int64_t step = 0; step < 2; ++step) {
          const int64_t begin = 4 * step + shift * rank.index();
          const Batch own{all.x.slice(0, begin, begin + 4), all.y.slice(0, begin, begin + 4), 4};
          trains ? net.forward_backward(own, torch::nn::functional::cross_entropy) : net.forward(own.x);
        }
      });
    });
  };
  for (const bool trains : {true, false}) {
    for (const lockstep::MeshShape& mesh : {lockstep::MeshShape{.pipeline = 2}, {.tensor = 2}}) {
      EXPECT_THAT(error(mesh, trains, 4), AllOf(HasSubstr("the same samples"), HasSubstr("net.mesh().data()")));
      EXPECT_EQ(error(mesh, trains, 0), "(no error)");
    }
  }
}

TEST(SplitModelTest, BatchesSplitOverAllRanksAreRefused) {
  const auto split_over_all = [](const lockstep::Dataset& data, Rank& rank, SplitModel&) {
    return lockstep::batches(data, {.size = 8}, rank);
  };
  for (const lockstep::MeshShape& mesh :
       {lockstep::MeshShape{.tensor = 2}, {.pipeline = 2}, {.data = 2, .pipeline = 2}, {.data = 2, .tensor = 2}}) {
    EXPECT_THAT(error_with_batches(mesh, split_over_all),
                AllOf(HasSubstr("their global batch 8"), HasSubstr("a mesh's data axis")))
        << lockstep::to_string(mesh);
  }
}

TEST(SplitModelTest, ASplitThatDoesNotFitIsRefusedBeforeTheFirstStep) {
  const auto error = [](int ranks, const ModelSplit& split) {
    return error_of([&] {
      lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) { SplitModel(make_net(), rank, split); });
    });
  };
  EXPECT_THAT(error(2, {.mesh = {.data = 3}}), HasSubstr("does not fit 2 devices; what would: 2 x 1 x 1"));
  EXPECT_THAT(error(1, {.mesh = {}, .schedule = PipelineSchedule::interleaved, .stages_per_rank = 9}),
              HasSubstr("a net of 8 layers has at most 8"));
  EXPECT_THAT(error(2, {.mesh = {.pipeline = 2}, .cuts = {8}}), HasSubstr("they must ascend, from 1 to 7"));
  EXPECT_THAT(error(2, {.mesh = {.pipeline = 2}, .cuts = {2, 3}}), HasSubstr("need 1 cuts, and there are 2"));
  EXPECT_THAT(error(2, {.mesh = {.pipeline = 2}, .stages_per_rank = 2}), HasSubstr("interleaved"));
  EXPECT_THAT(error(1, {.microbatches = 0}), HasSubstr("microbatches is 0"));
  EXPECT_THAT(error(5, {.mesh = {.tensor = 5}}), HasSubstr("conv1"));
  const std::string random = error_of([] {
    lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
      Sequential net = make_net();
      net->push_back("drop", torch::nn::Dropout(0.5));
      SplitModel(net, rank, {.mesh = {.tensor = 2}, .recompute = true});
    });
  });
  EXPECT_THAT(random, AllOf(HasSubstr("drop"), HasSubstr("draws random numbers")));
}

}  // namespace split_model_test
