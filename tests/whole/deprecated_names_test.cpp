// Every name of 0.1 that is still there does what its new name does. CHANGELOG.md has the list.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/lockstep.hpp>
#include <lockstep/ranks/functional.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"

#include <memory>
#include <type_traits>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace lockstep {
namespace deprecated_names_test {

static_assert(std::is_same_v<LrScaling, LearningRate::Scaling>);
static_assert(std::is_same_v<LrSchedule, LearningRate::Schedule>);
static_assert(std::is_same_v<DropoutOptions, DropoutImpl::Options>);
static_assert(std::is_same_v<SamplePlace, SampleScope::Place>);
static_assert(std::is_same_v<HookRound, CommunicationHook::Round>);
static_assert(std::is_same_v<Partner, Batches::Partner>);
static_assert(std::is_same_v<SampleFileOptions, Samples::FileOptions>);
static_assert(std::is_same_v<TensorsByName, Dataset::Tensors>);

TEST(DeprecatedNames, OptionsAreCheckedAndSet) {
  EXPECT_NE(error_of([] { check_learning_rate({.lr = -1}); }), "(no error)");
  torch::optim::OptimizerParamGroup group({}, std::make_unique<torch::optim::SGDOptions>(0.1));
  set_weight_decay(group, 0.5);
  EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(group.options()).weight_decay(), 0.5);
}

TEST(DeprecatedNames, WeightsAreLoadedWithOptions) {
  const ScratchFolder folder;
  const auto file = folder.path() / "weights.safetensors";
  save_weights(file, *torch::nn::Linear(2, 1));
  torch::nn::Linear same(2, 1), other(3, 2);
  EXPECT_TRUE(load_weights(file, *same, LoadOptions()).missing.empty());
  torch::nn::Sequential more(same, other);
  EXPECT_FALSE(load_weights(file, *more, LoadOptions{.strict = false}).missing.empty());
}

TEST(DeprecatedNames, CallsOfARankAreCountedAndPosted) {
  run(test_devices(2), [](Rank& rank) {
    const auto traffic = std::make_shared<Traffic>();
    Rank counted = observed(rank, traffic);
    const at::Tensor ones = torch::ones(4, rank.device());
    post_allreduce(counted, ones)->wait();
    EXPECT_TRUE(ones.equal(torch::full(4, 2.0, rank.device())));
    EXPECT_GT(traffic->sent, 0);
    EXPECT_EQ(gather_in_group(ones, 0, rank).size(0), 8);
  });
}

}  // namespace deprecated_names_test
}  // namespace lockstep

#pragma GCC diagnostic pop
