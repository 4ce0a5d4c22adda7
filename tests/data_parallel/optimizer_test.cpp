// Labels: concurrency arithmetic
// An Optimizer: against LibTorch's own, the same in each layout of its net, and saved in one to go on in another.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/optim/decay_groups.hpp>

#include "io/checked_tensors.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/tensor_bits.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace optimizer_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

using Net = DataParallel<nn::SequentialImpl>;
using Made = std::function<std::unique_ptr<Optimizer>(Net&)>;
using Use = std::function<void(Optimizer&, Rank&)>;

struct Layout {
  int ranks;
  Sharded sharded;
};

const std::vector<Layout> kLayouts = {{1, Sharded::nothing},
                                      {2, Sharded::nothing},
                                      {3, Sharded::state},
                                      {2, Sharded::gradients},
                                      {3, Sharded::parameters}};
const double kInfinity = std::numeric_limits<double>::infinity();

std::string to_string(const Layout& layout) {
  return std::to_string(layout.ranks) + " ranks, stage " + std::to_string(static_cast<int>(layout.sharded));
}

nn::Sequential two_layers() {
  torch::manual_seed(3);
  nn::Sequential net(nn::Linear(6, 30), nn::Tanh(), nn::Linear(30, 5));
  net->to(torch::kDouble);
  return net;
}

const Dataset kData{torch::arange(24 * 6, torch::kDouble).sin().view({24, 6}), torch::arange(24) % 5};

// A copy of a module trains all of its parameters.
nn::Sequential frozen_as(const nn::Sequential& net, const nn::Sequential& copy) {
  const auto from = net->parameters(), to = copy->parameters();
  for (size_t i = 0; i < to.size(); ++i) to[i].requires_grad_(from[i].requires_grad());
  return copy;
}

// Two steps an epoch, each by `step`. 256 bytes: several buckets.
nn::Sequential trained(const nn::Sequential& start, const Layout& layout, int64_t grain, const Made& made,
                       const Use& step, int first_epoch = 0, int epochs = 2, const Use& first = {},
                       const Use& last = {}) {
  nn::Sequential result;
  run(test_devices(layout.ranks), [&](Rank& rank) {
    const auto module = rank.in_turn([&] { return frozen_as(start, copy_of(start)); });
    Net net(module, rank, {.bucket_bytes = 256, .sharded = layout.sharded});
    const auto optimizer = made(net);
    if (first) first(*optimizer, rank);
    for (int epoch = first_epoch; epoch < first_epoch + epochs; ++epoch) {
      const BatchOptions options{.size = 12, .epoch = epoch, .shuffle = false, .grain = grain};
      for (const auto& batch : batches(kData.to(rank.device()), options, rank)) {
        optimizer->zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        step(*optimizer, rank);
      }
    }
    if (last) last(*optimizer, rank);
    const auto whole = net.whole();
    if (rank.index() == 0) result = copy_of(module);
  });
  return result;
}

void take_step(Optimizer& optimizer, Rank&) {
  EXPECT_TRUE(optimizer.step().taken);
}

// LibTorch's, on one device.
nn::Sequential trained_by_libtorch(const Optimizer::Make& make, const Optimizer::Grouping& grouping, double clip) {
  nn::Sequential net = two_layers();
  const auto optimizer = make(grouping(*net));
  for (int step = 0; step < 4; ++step) {
    const int64_t begin = step % 2 * 12;
    optimizer->zero_grad();
    F::cross_entropy(net->forward(kData.x.slice(0, begin, begin + 12)), kData.y.slice(0, begin, begin + 12)).backward();
    if (clip > 0) nn::utils::clip_grad_norm_(net->parameters(), clip);
    optimizer->step();
  }
  return net;
}

Optimizer::Groups in_one_group(const nn::Module& module) {
  return {optim::OptimizerParamGroup(module.parameters())};
}

struct Case {
  std::string name;
  Made made;
  Optimizer::Make make;
  Optimizer::Grouping grouping;
};

template <class Kind, class Options>
void add_cases(std::vector<Case>& cases, const std::string& name, const Options& options) {
  const Optimizer::Make make = [options](const auto& groups) { return std::make_unique<Kind>(groups, options); };
  const Optimizer::Make in_groups = [options](const auto& groups) {
    auto optimizer = std::make_unique<Kind>(groups, options);
    Optimizer::set_weight_decay(optimizer->param_groups()[1], 0);
    return optimizer;
  };
  cases.push_back(
      {name + " by options", [=](Net& net) { return std::make_unique<Optimizer>(net, options); }, make, in_one_group});
  cases.push_back(
      {name + " by a maker", [=](Net& net) { return std::make_unique<Optimizer>(net, make); }, make, in_one_group});
  cases.push_back({name + " in groups",
                   [=](Net& net) { return std::make_unique<Optimizer>(net, in_groups, decay_groups); }, in_groups,
                   decay_groups});
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  add_cases<optim::SGD>(cases, "SGD", optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  add_cases<optim::Adam>(cases, "Adam", optim::AdamOptions(0.01).weight_decay(0.1));
  add_cases<optim::AdamW>(cases, "AdamW", optim::AdamWOptions(0.01).weight_decay(0.1));
  return cases;
}

// With a grain to the bit.
TEST(Optimizer, InEachLayoutItIsLibTorchsOfWholeParameters) {
  for (const auto& [name, made, make, grouping] : cases()) {
    const nn::Sequential expected = trained_by_libtorch(make, grouping, 0);
    const auto bits = tensor_bits(*trained(two_layers(), kLayouts[0], 5, made, take_step));
    for (const Layout& layout : kLayouts) {
      const nn::Sequential net = trained(two_layers(), layout, 0, made, take_step);
      for (const auto& item : net->named_parameters()) {
        expect_near(item.value().detach(), expected->named_parameters()[item.key()].detach(), 1e-10,
                    name + ", " + to_string(layout) + ", " + item.key());
      }
      EXPECT_EQ(tensor_bits(*trained(two_layers(), layout, 5, made, take_step)), bits) << name << to_string(layout);
    }
  }
}

const Made kAdam = [](Net& net) { return std::make_unique<Optimizer>(net, optim::AdamOptions(0.05)); };
const Made kSgd = [](Net& net) { return std::make_unique<Optimizer>(net, optim::SGDOptions(0.1)); };

TEST(Optimizer, ClipsAsLibTorchByANormOfTheSameBitsInEachLayout) {
  const double most = 0.05;
  const nn::Sequential clipped = trained_by_libtorch(
      [](const auto& groups) { return std::make_unique<optim::SGD>(groups, 0.1); }, in_one_group, most);
  const auto not_clipped = tensor_bits(*trained(two_layers(), kLayouts[0], 5, kSgd, take_step));
  std::map<double, std::vector<double>> expected;  // by `clip`
  for (const Layout& layout : kLayouts) {
    for (const double clip : {most, kInfinity}) {
      std::vector<double> norms;
      const auto net = trained(two_layers(), layout, 5, kSgd, [&](Optimizer& sgd, Rank& rank) {
        const Step step = sgd.step({.clip = clip});
        expect_equal_on_all_ranks(step.norm, rank, "the norm");
        if (rank.index() == 0) norms.push_back(step.norm.item<double>());
      });
      ASSERT_EQ(norms.size(), 4u);
      EXPECT_GT(norms[0], most);
      EXPECT_EQ(expected.try_emplace(clip, norms).first->second, norms) << to_string(layout);
      if (clip == kInfinity) {
        EXPECT_EQ(tensor_bits(*net), not_clipped) << to_string(layout);
        continue;
      }
      for (const auto& item : net->named_parameters()) {
        expect_near(item.value().detach(), clipped->named_parameters()[item.key()].detach(), 1e-12,
                    to_string(layout) + item.key());
      }
    }
    trained(two_layers(), layout, 0, kSgd, [](Optimizer& sgd, Rank&) {
      for (const double clip : {-1., std::nan("")}) {
        EXPECT_THAT(error_of([&] { sgd.step({.clip = clip}); }), Refused());
      }
      EXPECT_FALSE(sgd.step().norm.defined());
    });
  }
}

// One rank's is seen on all.
TEST(Optimizer, AStepThatIsNotFiniteIsNotTakenOnAnyRank) {
  for (const Layout& layout : kLayouts) {
    for (const double bad : {std::nan(""), kInfinity}) {
      int steps = 0;
      const auto spoilt = [&](Optimizer& adam, Rank& rank) {
        if (rank.index() == 0) adam.gradients().back().view(-1)[0] = bad;  // others may have no slice
        const Step step = adam.step({.clip = 1, .skip_not_finite = true});
        EXPECT_FALSE(step.taken);
        EXPECT_FALSE(step.norm.defined());
        if (rank.index() == 0) ++steps;
      };
      const auto net = trained(two_layers(), layout, 0, kAdam, spoilt);
      EXPECT_EQ(steps, 4);
      EXPECT_EQ(tensor_bits(*net), tensor_bits(*two_layers())) << to_string(layout);
    }
    const auto net = trained(two_layers(), layout, 5, kAdam,
                             [](Optimizer& adam, Rank&) { EXPECT_TRUE(adam.step({.skip_not_finite = true}).taken); });
    EXPECT_EQ(tensor_bits(*net), tensor_bits(*trained(two_layers(), kLayouts[0], 5, kAdam, take_step)));
  }
}

TEST(Optimizer, StepsWithItsGradientsAsTheyWereChanged) {
  for (const Layout& layout : kLayouts) {
    const auto net = trained(two_layers(), layout, 0, kSgd, [](Optimizer& sgd, Rank&) {
      for (const Tensor& gradient : sgd.gradients()) gradient.zero_();
      sgd.step();
    });
    EXPECT_EQ(tensor_bits(*net), tensor_bits(*two_layers())) << to_string(layout);
  }
}

// ---- Its file.

const Made kInGroups = [](Net& net) {
  return std::make_unique<Optimizer>(
      net, [](const auto& groups) { return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.05)); },
      decay_groups);
};

optim::AdamWOptions& options_of(Optimizer& optimizer, size_t group) {
  return static_cast<optim::AdamWOptions&>(optimizer.param_groups().at(group).options());
}

TEST(Optimizer, InAnyOtherLayoutItGoesOnWithTheSameBitsAndOptions) {
  const auto change = [](Optimizer& adam, Rank&) {
    Optimizer::set_weight_decay(adam.param_groups()[1], 0.3);
    adam.set_lr(0.02);
  };
  const auto bits = tensor_bits(*trained(two_layers(), kLayouts[0], 5, kInGroups, take_step, 0, 2, change));
  const std::vector<Sharded> all = {Sharded::nothing, Sharded::state, Sharded::gradients, Sharded::parameters};
  for (size_t i = 0; i < all.size(); ++i) {
    const ScratchFolder folder;
    const auto half = trained(two_layers(), {2, all[i]}, 5, kInGroups, take_step, 0, 1, change,
                              [&](Optimizer& adam, Rank&) { adam.save(folder / "adam"); });
    const auto load = [&](Optimizer& adam, Rank&) {
      adam.load(folder / "adam");
      EXPECT_EQ(options_of(adam, 0).lr(), 0.02);
      EXPECT_EQ(options_of(adam, 0).weight_decay(), 0.01);
      EXPECT_EQ(options_of(adam, 1).weight_decay(), 0.3);
    };
    const Layout other{3, all[(i + 2) % all.size()]};
    EXPECT_EQ(tensor_bits(*trained(half, other, 5, kInGroups, take_step, 1, 1, load)), bits) << to_string(other);
  }
}

nn::Sequential with_first_weight(bool trains) {
  nn::Sequential net = two_layers();
  net->parameters()[0].requires_grad_(trains);
  return net;
}

// Gives the warnings of a net that loads the optimizer of one whose first weight was trained, or was not. `with_state`
// becomes the number of parameters with a state.
std::vector<std::string> warnings_of_load(const Layout& layout, bool was_trained, bool trains, int64_t& with_state) {
  const ScratchFolder folder;
  trained(with_first_weight(was_trained), {2, Sharded::state}, 0, kAdam, take_step, 0, 1, {},
          [&](Optimizer& adam, Rank&) { adam.save(folder / "adam"); });
  std::vector<std::string> warnings;
  run(test_devices(layout.ranks),
      [&](Rank& rank) {
        const auto module = rank.in_turn([&] { return with_first_weight(trains); });
        Net net(module, rank, {.sharded = layout.sharded});
        const auto adam = kAdam(net);
        adam->load(folder / "adam");
        for (const auto& batch : batches(kData.to(rank.device()), {.size = 12}, rank)) {
          adam->zero_grad();
          net.loss(batch, F::cross_entropy).backward();
          adam->step();
        }
        adam->save(folder / "again");
      },
      {.on_warning = [&](const std::string& text) { warnings.push_back(text); }});
  with_state = 0;
  for (const auto& [name, value] : io::read_checked(folder / "again")) {
    if (name.rfind("step.", 0) != 0) continue;
    ++with_state;
    EXPECT_EQ(value.item<int64_t>(), name == "step.0.weight" && !was_trained ? 2 : 4) << name;
  }
  return warnings;
}

TEST(Optimizer, AParameterThatIsFrozenOrUnfrozenMeanwhileIsAWarning) {
  for (const Layout& layout : kLayouts) {
    int64_t with_state = 0;
    EXPECT_THAT(warnings_of_load(layout, true, true, with_state), IsEmpty());
    EXPECT_EQ(with_state, 4);
    EXPECT_THAT(warnings_of_load(layout, true, false, with_state),
                ElementsAre(AllOf(HasSubstr("state of parameters that are frozen now is left out: "),
                                  HasSubstr("exp_avg.0.weight"), HasSubstr("step.0.weight"))))
        << to_string(layout);
    EXPECT_EQ(with_state, 3);
    EXPECT_THAT(warnings_of_load(layout, false, true, with_state),
                ElementsAre(HasSubstr("no state of these parameters, which begin anew: 0.weight")))
        << to_string(layout);
    EXPECT_EQ(with_state, 4);
  }
}

TEST(Optimizer, AFileOfAnotherOneIsRefusedAndNothingChanges) {
  const ScratchFolder folder;
  const auto save = [&](const std::string& name, const nn::Sequential& net, const Made& made) {
    run(test_devices(2), [&](Rank& rank) {
      Net wrapped(copy_of(net), rank);
      const auto optimizer = made(wrapped);
      optimizer->set_lr(0.7);
      const Batch batch{torch::ones({1, 6}, torch::kDouble), torch::zeros({1}, torch::kLong), rank.world_size()};
      wrapped.loss(batch, F::cross_entropy).backward();
      optimizer->step();
      optimizer->save(folder / name);
    });
  };
  nn::Sequential wider(nn::Linear(6, 31), nn::Tanh(), nn::Linear(31, 5)), deeper = two_layers();
  wider->to(torch::kDouble);
  deeper->push_back(nn::Linear(5, 5));
  deeper->to(torch::kDouble);
  save("kind", two_layers(), kSgd);
  save("groups", two_layers(), kInGroups);
  save("shape", wider, kAdam);
  save("net", deeper, kAdam);
  folder.write("bytes", "no safetensors file");
  const std::vector<std::pair<std::string, std::string>> refusals = {
      {"kind", "of another kind of optimizer"}, {"groups", "2 groups"}, {"shape", "shape"},
      {"net", "no place for the state"},        {"bytes", "bytes"},     {"not there", "not there"}};
  for (const Layout& layout : kLayouts) {
    trained(two_layers(), layout, 0, kAdam, take_step, 0, 1, {}, [&](Optimizer& adam, Rank& rank) {
      adam.save(folder / "before");
      for (const auto& [name, why] : refusals) {
        EXPECT_THAT(error_of([&, &name = name] { adam.load(folder / name); }), Fails(Error::file)) << to_string(layout);
      }
      adam.save(folder / "after");
      if (rank.index() == 0) EXPECT_EQ(folder.read("after"), folder.read("before")) << to_string(layout);
    });
  }
}

}  // namespace optimizer_test
}  // namespace lockstep
