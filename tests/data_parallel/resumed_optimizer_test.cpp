// Labels: concurrency
// What a program goes on with beside its weights: LibTorch's schedulers of an Optimizer's learning rates, and what fits
// of another network's optimizer.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/optim/decay_groups.hpp>

#include "io/checked_tensors.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/tensor_bits.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace resumed_optimizer_test {

using testing::ElementsAre;
using testing::IsEmpty;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

struct Layout {
  int ranks;
  Sharded sharded;
};
const std::vector<Layout> kLayouts = {{1, Sharded::nothing},
                                      {2, Sharded::nothing},
                                      {3, Sharded::state},
                                      {2, Sharded::gradients},
                                      {3, Sharded::parameters}};

std::string to_string(const Layout& layout) {
  return std::to_string(layout.ranks) + " ranks, stage " + std::to_string(static_cast<int>(layout.sharded));
}

struct Net : nn::Module {
  explicit Net(int64_t classes = 5) : head(register_module("head", nn::Linear(30, classes))) { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return head(torch::tanh(features(x))); }
  nn::Linear features = register_module("features", nn::Linear(6, 30));
  nn::Linear head;
};

std::shared_ptr<Net> make_net(int64_t classes = 5) {
  torch::manual_seed(3);
  return std::make_shared<Net>(classes);
}

const Dataset kData{torch::arange(24 * 6, torch::kDouble).sin().view({24, 6}), torch::arange(24) % 5};

// Two steps; gives the epoch's last loss over all ranks.
double train_epoch(DataParallel<Net>& net, Optimizer& optimizer, Rank& rank, int epoch) {
  double loss_of_all = 0;
  for (const auto& batch : batches(kData.to(rank.device()), {.size = 12, .epoch = epoch, .grain = 4}, rank)) {
    optimizer.zero_grad();
    Loss loss = net.loss(batch, F::cross_entropy);
    loss.backward();
    optimizer.step();
    loss_of_all = loss.global_item();
  }
  return loss_of_all;
}

// ---- Schedulers.

// A scheduler sets rates by its count alone.
struct Sawtooth : optim::LRScheduler {
  Sawtooth(optim::Optimizer& optimizer, double lr) : LRScheduler(optimizer), lr_(lr) {}
  std::vector<double> get_lrs() override {
    std::vector<double> rates = get_current_lrs();
    rates.back() = lr_ / (1 + step_count_ % 3);
    return rates;
  }
  const double lr_;
};

using Rates = std::vector<std::vector<double>>;  // each epoch's rates of the groups

std::vector<double> rates_of(std::vector<optim::OptimizerParamGroup>& groups) {
  std::vector<double> rates;
  for (auto& group : groups) rates.push_back(group.options().get_lr());
  return rates;
}

// Goes on from `folder`, as docs/guide/optimizer.md has it, to epoch `end`; gives the rates of its epochs.
Rates train_with_schedulers(const Layout& layout, const ScratchFolder& folder, int end) {
  Rates rates;
  run(test_devices(static_cast<size_t>(layout.ranks)), [&](Rank& rank) {
    const auto module = rank.in_turn([] { return make_net(); });
    std::vector<double> losses;  // the losses that the schedulers have seen, one per epoch
    const bool goes_on = std::filesystem::exists(folder / "losses");
    if (goes_on) load_weights(folder / "net", *module);
    DataParallel<Net> net(module, rank, {.sharded = layout.sharded});
    Optimizer adam(net, optim::AdamOptions(0.1), decay_groups);
    auto steps = adam.scheduler<optim::StepLR>(/*step_size=*/2, /*gamma=*/0.3);
    auto plateau = adam.scheduler<optim::ReduceLROnPlateauScheduler>(
        optim::ReduceLROnPlateauScheduler::min, /*factor=*/0.5F, /*patience=*/1, /*threshold=*/0.2);
    auto sawtooth = adam.scheduler<Sawtooth>(0.01);
    const auto step_all = [&](double loss) {
      sawtooth.step();
      steps.step();
      plateau.step(static_cast<float>(loss));
    };
    if (goes_on) {
      const Tensor seen = load_tensors(folder / "losses").at("losses");
      losses.assign(seen.const_data_ptr<double>(), seen.const_data_ptr<double>() + seen.numel());
      for (const double loss : losses) step_all(loss);
      adam.load(folder / "adam");
    }
    rank.barrier();
    for (int epoch = static_cast<int>(losses.size()); epoch < end; ++epoch) {
      if (rank.index() == 0) rates.push_back(rates_of(adam.param_groups()));
      losses.push_back(train_epoch(net, adam, rank, epoch));
      step_all(losses.back());
    }
    adam.save(folder / "adam");
    const auto whole = net.whole();
    if (rank.index() != 0) return;
    save_weights(folder / "net", *net);
    save_tensors(folder / "losses", {{"losses", torch::tensor(losses, torch::kDouble)}});
  });
  return rates;
}

TEST(ResumedOptimizer, HasTheRatesOfLibTorchsSchedulersAndTheSameBits) {
  const int epochs = 7;
  const ScratchFolder whole;
  const Rates expected = train_with_schedulers(kLayouts[0], whole, epochs);
  ASSERT_EQ(expected.size(), 7u);
  std::vector<double> of_first;
  for (const auto& rates : expected) of_first.push_back(rates.at(0));
  EXPECT_EQ(of_first[0], 0.1);
  EXPECT_LT(of_first[6], 0.1 * 0.3 * 0.3 * 0.3 * 0.9);  // the plateau has halved it too
  Net net;
  load_weights(whole / "net", net);
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    for (const int stop : {1, 3, 4}) {
      const ScratchFolder folder;
      Rates rates = train_with_schedulers(kLayouts[i], folder, stop);
      const Rates rest = train_with_schedulers(kLayouts[(i + 2) % kLayouts.size()], folder, epochs);
      rates.insert(rates.end(), rest.begin(), rest.end());
      EXPECT_EQ(rates, expected) << to_string(kLayouts[i]) << ", " << stop;
      Net resumed;
      load_weights(folder / "net", resumed);
      EXPECT_EQ(tensor_bits(resumed), tensor_bits(net)) << to_string(kLayouts[i]) << ", " << stop;
    }
  }
}

// torch::save() keeps an optimizer of LibTorch's own with the rates.
TEST(ResumedOptimizer, LibTorchsOwnGoesOnByTheSameOrder) {
  Net net;
  const auto make = [&] {
    return std::make_unique<optim::SGD>(net.parameters(), optim::SGDOptions(0.3).momentum(0.9));
  };
  const auto whole = make(), before = make(), after = make();
  optim::StepLR rate(*whole, 3, 0.7), rate_before(*before, 3, 0.7), rate_after(*after, 3, 0.7);
  std::stringstream file;
  for (int step = 0; step < 5; ++step) rate_before.step();
  torch::save(*before, file);
  for (int step = 0; step < 5; ++step) rate_after.step();
  torch::load(*after, file);
  for (int step = 0; step < 9; ++step) rate.step();
  for (int step = 5; step < 9; ++step) rate_after.step();
  EXPECT_EQ(rates_of(after->param_groups()), rates_of(whole->param_groups()));
}

// ---- Another network's file.

// Loads `file` into an optimizer of a net with `classes`, and gives the result and the state and the rate after it.
struct Loaded {
  UnmatchedNames unmatched;
  std::map<std::string, Tensor> state;
  double lr = 0;
};
Loaded loaded(const Layout& layout, const std::filesystem::path& file, const ScratchFolder& folder, int64_t classes,
              bool head_alone = false) {
  Loaded result;
  run(test_devices(static_cast<size_t>(layout.ranks)), [&](Rank& rank) {
    const auto module = rank.in_turn([&] { return make_net(classes); });
    if (head_alone) module->features->weight.requires_grad_(false);
    DataParallel<Net> net(module, rank, {.bucket_bytes = 256, .sharded = layout.sharded});
    Optimizer adam(net, optim::AdamOptions(0.25));
    const UnmatchedNames unmatched = adam.load(file, /*strict=*/false);
    adam.save(folder / "after");
    if (rank.index() != 0) return;
    result.unmatched = unmatched;
    result.lr = adam.param_groups()[0].options().get_lr();
  });
  for (auto& [name, tensor] : io::read_checked(folder / "after")) result.state[name] = tensor;
  return result;
}

TEST(ResumedOptimizer, NotStrictTakesWhatFitsAndTellsTheRest) {
  const ScratchFolder folder;
  std::map<std::string, Tensor> before;
  run(test_devices(2), [&](Rank& rank) {
    const auto module = rank.in_turn([] { return make_net(); });
    DataParallel<Net> net(module, rank);
    Optimizer adam(net, optim::AdamOptions(0.05), decay_groups);  // two groups, where the others have one
    train_epoch(net, adam, rank, 0);
    adam.save(folder / "file");
  });
  for (auto& [name, tensor] : io::read_checked(folder / "file")) before[name] = tensor;
  auto foreign = io::read_checked(folder / "file");
  for (auto& [name, tensor] : foreign) {
    if (name.ends_with(".head.bias")) name.replace(name.find("head"), 4, "neck");
  }
  io::write_checked(folder / "foreign", foreign);

  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(to_string(layout));
    const Loaded same = loaded(layout, folder / "file", folder, 5);
    EXPECT_THAT(same.unmatched.missing, IsEmpty());
    EXPECT_THAT(same.unmatched.unexpected, IsEmpty());
    EXPECT_EQ(same.state.size(), before.size());
    EXPECT_EQ(same.lr, 0.25);

    const Loaded other_head = loaded(layout, folder / "file", folder, 3);
    EXPECT_THAT(other_head.unmatched.missing, ElementsAre("head.bias", "head.weight"));
    EXPECT_THAT(other_head.unmatched.unexpected, ElementsAre("head.bias", "head.weight"));

    const Loaded other_name = loaded(layout, folder / "foreign", folder, 5);
    EXPECT_THAT(other_name.unmatched.missing, ElementsAre("head.bias"));
    EXPECT_THAT(other_name.unmatched.unexpected, ElementsAre("neck.bias"));

    const Loaded frozen = loaded(layout, folder / "file", folder, 5, /*head_alone=*/true);
    EXPECT_THAT(frozen.unmatched.missing, IsEmpty());
    EXPECT_THAT(frozen.unmatched.unexpected, ElementsAre("features.weight"));

    for (const Loaded* const found : {&same, &other_head, &other_name, &frozen}) {
      for (const auto& [name, tensor] : found->state) EXPECT_TRUE(torch::equal(tensor, before.at(name))) << name;
      const auto count = [&](const std::string& parameter) { return found->state.count("exp_avg." + parameter); };
      EXPECT_EQ(count("features.bias"), 1u);
      EXPECT_EQ(count("features.weight"), found == &frozen ? 0u : 1u);
      EXPECT_EQ(count("head.weight"), found == &other_head ? 0u : 1u);
      EXPECT_EQ(count("head.bias"), found == &other_head || found == &other_name ? 0u : 1u);
    }
  }
}

// One of SGD's is still refused, and nothing has changed.
TEST(ResumedOptimizer, NotStrictStillTakesNoOtherKindOfOptimizer) {
  const ScratchFolder folder;
  run(test_devices(1), [&](Rank& rank) {
    DataParallel<Net> net(make_net(), rank);
    Optimizer sgd(net, optim::SGDOptions(0.05).momentum(0.9)), adam(net, optim::AdamOptions(0.05));
    train_epoch(net, sgd, rank, 0);
    sgd.save(folder / "sgd");
    train_epoch(net, adam, rank, 0);
    adam.save(folder / "before");
    EXPECT_THAT(error_of([&] { adam.load(folder / "sgd", false); }), Fails(Error::file));
    adam.save(folder / "after");
    EXPECT_EQ(folder.read("after"), folder.read("before"));
  });
}

}  // namespace resumed_optimizer_test
}  // namespace lockstep
