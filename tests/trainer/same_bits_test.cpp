// Labels: concurrency long
// A run with a grain gives one hash of the weights, and one train loss, on every layout of its ranks.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include "support/error_of.hpp"
#include "support/small_nets.hpp"
#include "support/small_training.hpp"
#include "support/test_devices.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/workload.hpp"

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace same_bits_test {

// A way to lay out a run: the ranks, and what else must not show in the results.
struct Layout {
  std::string name;
  int ranks = 1;
  std::function<void(TrainOptions&)> change = [](TrainOptions&) {};
};

std::vector<Layout> numbers_of_ranks() {
  return {{"2 ranks", 2}, {"3 ranks", 3}, {"5 ranks", 5}};
}

std::vector<Layout> data_layouts() {
  return {{"accumulate 2", 2, [](auto& o) { o.batch.accumulate = 2; }},
          {"accumulate 3, alone", 1, [](auto& o) { o.batch.accumulate = 3; }},
          {"balance 2:1", 2,
           [](auto& o) {
             o.batch.balance = std::vector<double>{2, 1};
           }},
          {"balance 1:0:3", 3,
           [](auto& o) {
             o.batch.balance = std::vector<double>{1, 0, 3};
           }},
          {"balance auto", 3, [](auto& o) { o.batch.balance = PartsBySpeed(); }}};
}

std::vector<Layout> zero_layouts() {
  return {{"ZeRO 1", 3, [](auto& o) { o.way = Sharded::state; }},
          {"ZeRO 2", 2, [](auto& o) { o.way = Sharded::gradients; }},
          {"ZeRO 2, accumulate 2", 3, [](auto& o) { o.way = Sharded::gradients, o.batch.accumulate = 2; }},
          {"ZeRO 3", 5, [](auto& o) { o.way = Sharded::parameters; }},
          {"ZeRO 3, accumulate 2", 3, [](auto& o) { o.way = Sharded::parameters, o.batch.accumulate = 2; }}};
}

std::vector<Layout> pipeline_layouts() {
  return {{"pipeline of 2", 2, [](auto& o) { o.way = SplitNetwork{{.mesh = {.pipeline = 2}}}; }},
          {"pipeline of 2, gpipe, recomputed", 2,
           [](auto& o) {
             o.way = SplitNetwork{{.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::gpipe, .recompute = true}};
           }},
          {"2 pipelines of 2", 4, [](auto& o) { o.way = SplitNetwork{{.mesh = {.data = 2, .pipeline = 2}}}; }}};
}

std::vector<Layout> all_layouts() {
  std::vector<Layout> all;
  for (const auto& some : {numbers_of_ranks(), data_layouts(), zero_layouts(), pipeline_layouts()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

class SameBits : public SmallTraining {
 protected:
  // Batches of four grains; the last one, of 22 samples, has two and a smaller one.
  TrainOptions grained(const std::string& model) const {
    TrainOptions settings = options(1, "");
    settings.keep.run_dir.clear();
    settings.model = {.name = model};
    if (model == "alexnet") settings.model = {.name = model, .width = 0.05, .image_size = 65};
    if (model == "resnet18") settings.model = {.name = model, .width = 0.05};
    if (model == "mlp") settings.model = {.name = model, .width = 0.125};
    settings.memory_format = MemoryFormat::contiguous;
    settings.batch.grain = 8;
    settings.optimizer.momentum = 0.9;
    settings.rate.lr = 0.02;
    settings.epochs = model == "resnet18" ? 1 : 2;
    return settings;
  }

  static TrainOptions laid_out(TrainOptions settings, const Layout& layout) {
    settings.devices = test_devices(layout.ranks);
    layout.change(settings);
    return settings;
  }

  static void expect_one(const TrainResult& result, const TrainResult& expected) {
    expect_same(result, expected);
    for (size_t i = 0; i < result.history.size(); ++i) {
      EXPECT_EQ(result.history[i].weights, expected.history[i].weights) << "epoch " << i + 1;
    }
  }

  static void expect_one_on(const std::vector<Layout>& layouts, const TrainOptions& settings) {
    const TrainResult expected = train(laid_out(settings, {"alone", 1}));
    for (const Layout& layout : layouts) {
      SCOPED_TRACE(settings.model.name + ", " + layout.name);
      expect_one(train(laid_out(settings, layout)), expected);
    }
  }
};

TEST_F(SameBits, OfLeNet) {
  expect_one_on(all_layouts(), grained("lenet"));
}

TEST_F(SameBits, OfResNetWithItsRunningStatistics) {
  expect_one_on(all_layouts(), grained("resnet18"));
}

TEST_F(SameBits, OfAlexNetWithDropout) {
  TrainOptions settings = grained("alexnet");
  ASSERT_GT(settings.model.dropout, 0);
  settings.epochs = 1;
  expect_one_on(all_layouts(), settings);
}

TEST_F(SameBits, OfEachOptimizer) {
  for (const char* optimizer : {"sgd", "adam", "adamw", "lars", "lamb"}) {
    TrainOptions settings = grained("mlp");
    settings.epochs = 1;
    settings.optimizer.kind = optimizer_from(optimizer);
    if (std::string(optimizer) != "lars") settings.optimizer.momentum = 0;
    settings.optimizer.weight_decay = 1e-4;
    settings.rate.lr = 0.01;
    expect_one_on(numbers_of_ranks(), settings);
    expect_one_on(pipeline_layouts(), settings);
    if (!needs_whole_layers(settings.optimizer.kind)) expect_one_on(zero_layouts(), settings);
  }
}

TEST_F(SameBits, WithClippedGradients) {
  TrainOptions settings = grained("mlp");
  settings.optimizer.clip = 0.1;
  expect_one_on(all_layouts(), settings);
}

TEST_F(SameBits, InChannelsLastAndInBfloat16) {
  TrainOptions settings = grained("resnet18");
  settings.memory_format = MemoryFormat::channels_last;
  expect_one_on(numbers_of_ranks(), settings);
  expect_one_on(zero_layouts(), settings);
  expect_one_on(pipeline_layouts(), settings);
  settings = grained("mlp");
  settings.precision = Precision::bf16;
  expect_one_on(numbers_of_ranks(), settings);
}

TEST_F(SameBits, WithAnyGrain) {
  std::vector<std::string> hashes;
  for (const int64_t grain : {1, 5, 32}) {
    TrainOptions settings = grained("mlp");
    settings.epochs = 1;
    settings.batch.grain = grain;
    expect_one_on(numbers_of_ranks(), settings);
    hashes.push_back(train(settings).history[0].weights);
  }
  EXPECT_NE(hashes[0], hashes[1]);
  EXPECT_NE(hashes[1], hashes[2]);
}

// From a step within an epoch, and from another one on other ranks again.
TEST_F(SameBits, AfterARunWasStoppedAndWentOnOnOtherRanks) {
  for (const std::string model : {"lenet", "resnet18"}) {
    SCOPED_TRACE(model);
    TrainOptions settings = grained(model);
    const TrainResult expected = train(settings);
    settings.keep.checkpoints = {.last = 100, .every = 1};
    const auto in = [&](const std::string& name, const Layout& layout) {
      TrainOptions in = laid_out(settings, layout);
      in.keep.run_dir = runs_ / (model + name);
      return in;
    };
    for (const std::vector<int>& chain : {std::vector{3, 7, 2}, std::vector{1, 2, 4, 1}}) {
      std::string from, name;  // the run before it, and this one's, such as 3-7-2-
      for (size_t i = 0; i < chain.size(); ++i, from = name) {
        name += std::to_string(chain[i]) + "-";
        SCOPED_TRACE(name);
        const TrainOptions here = in(name, {"", chain[i]});
        const std::string step = "epoch-0000-step-00000" + std::to_string(i + 1);
        expect_one(i == 0 ? train(here) : go_on(here, checkpoint(model + from, step)), expected);
      }
    }
    const auto third = checkpoint(model + "3-7-2-", "epoch-0000-step-000004");
    TrainOptions other = in("other", {"", 2});
    other.memory_format = MemoryFormat::channels_last;
    EXPECT_THAT(error_of([&] { go_on(other, third); }), Refused());
    size_t number = 0;
    for (const auto& layouts : {zero_layouts(), pipeline_layouts()}) {
      for (const auto& layout : layouts) {
        if (layout.name.find("accumulate") != layout.name.npos) continue;  // a run keeps its number of these
        SCOPED_TRACE(layout.name);
        expect_one(go_on(in(std::to_string(number++), layout), third), expected);
      }
    }
  }
}

TEST_F(SameBits, WithASkippedStep) {
  ImageData data = synthetic_images(150, 40);
  data.train.x = data.train.x.to(torch::kFloat) / 255;
  data.train.x[33].fill_(std::numeric_limits<float>::quiet_NaN());
  for (const std::string model : {"mlp", "resnet18"}) {
    TrainOptions settings = grained(model);
    settings.on_nan = OnNan::skip;
    settings.epochs = 1;
    const auto result_of = [&](const Layout& layout) {
      const TrainOptions here = laid_out(settings, layout);
      const TrainCallbacks callbacks;
      std::pair<double, std::string> result;
      run(here.devices, [&](Rank& rank) {
        RankTrainer trainer(here, callbacks, task_of(here, data), rank, nullptr, nullptr);
        const EpochMetrics metrics = trainer.epoch(1);
        EXPECT_EQ(trainer.not_finite(), "");
        const auto net = trainer.whole();
        if (rank.index() == 0) result = {metrics.train_loss, weights_hash(*net)};
      });
      return result;
    };
    const auto expected = result_of({"alone", 1});
    EXPECT_GT(expected.first, 0);
    for (const Layout& layout : all_layouts()) {
      SCOPED_TRACE(model + ", " + layout.name);
      EXPECT_EQ(result_of(layout), expected);
    }
  }
}

}  // namespace same_bits_test
}  // namespace lockstep
