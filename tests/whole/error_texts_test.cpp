// Labels: concurrency
// What errors say, of each kind one or two: which rank, on which device, in which operation, and what to do. Other
// tests compare causes, ranks and options (support/error_of.hpp), so that better words break no test but these. Five
// compare words too, since no data holds what they look for: data_parallel/check_replicas_test.cpp and
// split/split_replicas_test.cpp (the tensor that differs), trainer/checkpoint_folder_test.cpp (the checkpoint to take
// instead), trainer/fit_test.cpp (the function that stands still) and trainer/refusals_test.cpp (which of two pairs
// that have the same keys). Texts of lost processes are in comm/processes/process_failures_test.cpp, since a process
// must die for them.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/fit.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/meeting.hpp"
#include "devices/check_devices.hpp"
#include "io/read_text.hpp"
#include "io/safetensors.hpp"
#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"
#include "tensor_parallel/shard.hpp"

#include <chrono>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {
namespace error_texts_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using namespace std::chrono_literals;

// ---- Ranks.

TEST(ErrorTexts, OfARankThatThrowsNameRankAndDeviceWithoutABacktrace) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               if (rank.index() == 1) torch::ones({2, 3}).mm(torch::ones({2, 3}));
                               rank.barrier();
                             }),
              AllOf(StartsWith("rank 1 (cpu): "), HasSubstr("2x3"), Not(HasSubstr("frame #"))));
}

TEST(ErrorTexts, OfARankThatThrowsHaveItsOwnWords) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               if (rank.index() == 0) throw std::runtime_error("out of luck");
                               rank.barrier();
                             }),
              HasSubstr("rank 0 (cpu): out of luck"));
}

TEST(ErrorTexts, OfCallsThatDifferNameBothAndWhatToDo) {
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { rank.allreduce(torch::ones({2 + rank.index()})); }),
              AllOf(HasSubstr("calls differ"), HasSubstr("allreduce(sum) of float [2]"),
                    HasSubstr("allreduce(sum) of float [3]"), HasSubstr("rank 0 (cpu)"), HasSubstr("rank 1 (cpu)")));
}

TEST(ErrorTexts, OfATimeoutSayWhoWaitsForWhomAndWhere) {
  EXPECT_THAT(error_of([] {
                run(test_devices(2),
                    [](Rank& rank) {
                      if (rank.index() == 1) std::this_thread::sleep_for(600ms);
                      rank.allreduce(torch::ones(2));
                    },
                    {.timeout = 200ms});
              }),
              AllOf(HasSubstr("rank 0 (cpu) waited 0.2 s"), HasSubstr("allreduce(sum) of float [2]"),
                    HasSubstr("rank 1 (cpu), which has not made this call")));
}

TEST(ErrorTexts, OfARankThatReturnsEarlyNameTheCallThatItLacks) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               if (rank.index() == 0) rank.barrier();
                             }),
              AllOf(HasSubstr("rank 1 (cpu) returned without"), HasSubstr("rank 0 (cpu)"), HasSubstr("barrier")));
}

TEST(ErrorTexts, OfARankThatIsKeptSayThatItsRunIsOver) {
  std::optional<Rank> kept;
  run(test_devices(1), [&](Rank& rank) { kept = rank; });
  EXPECT_THAT(error_of([&] { kept->barrier(); }),
              AllOf(HasSubstr("rank 0 (cpu): "), HasSubstr("run() that this rank belongs to is over")));
}

// ---- Networks and batches.

TEST(ErrorTexts, OfModulesThatDifferNameTheParameterAndBothShapes) {
  EXPECT_THAT(error_on_ranks(2, [](Rank& rank) { DataParallel net(torch::nn::Linear(2, 3 + rank.index()), rank); }),
              AllOf(HasSubstr("weight, Float [3, 2] on rank 0, and weight, Float [4, 2] on rank 1"),
                    HasSubstr("Every rank must build the same module")));
}

TEST(ErrorTexts, OfReplicasThatDifferNameTheFirstTensorAndCountTheOthers) {
  EXPECT_THAT(error_on_ranks(3,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(2, 3), rank);
                               const torch::NoGradGuard no_grad;
                               if (rank.index() == 2) {
                                 net->weight.add_(1);
                                 net->bias.add_(1);
                               }
                               check_replicas(net);
                             }),
              HasSubstr("rank 2 (cpu) from the others in weight and 1 more. "));
}

TEST(ErrorTexts, OfABatchThatIsNotSplitSayHowToSplitIt) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(2, 3), rank);
                               const Batch batch{torch::ones({4, 2}), torch::zeros({4}, torch::kLong), 4};
                               net.loss(batch, torch::nn::functional::cross_entropy).backward();
                               rank.barrier();
                             }),
              AllOf(HasSubstr("have 8 samples together, but their global batch 4"), HasSubstr("batches(…, rank)")));
}

TEST(ErrorTexts, OfALossWithoutGradientsNameWhatHidesThem) {
  EXPECT_THAT(error_on_ranks(1,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(2, 3), rank);
                               net.mean(torch::ones({}), 1, 1).backward();
                             }),
              AllOf(HasSubstr("rank 0 (cpu): DataParallel: backward() of a loss that no parameter leads to"),
                    HasSubstr("NoGradGuard"), HasSubstr("with gradients on")));
}

TEST(ErrorTexts, OfALossThatLeavesOutTargetsSayWhatToDivideBy) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::Linear(2, 3), rank);
                               const Dataset data{torch::ones({4, 2}), torch::tensor({0, -100, 1, 2})};
                               for (auto& batch : batches(data, {.size = 4, .shuffle = false}, rank))
                                 net.loss(batch, torch::nn::functional::cross_entropy).backward();
                             }),
              AllOf(HasSubstr("leaves out targets of ignore_index"), HasSubstr("MeanOver(sum, of)")));
}

TEST(ErrorTexts, OfABatchNormWithOneSampleNameTheOptionThatLeavesItOut) {
  EXPECT_THAT(error_on_ranks(1,
                             [](Rank& rank) {
                               DataParallel net(torch::nn::BatchNorm1d(2), rank);
                               const Batch batch{torch::ones({1, 2}), torch::ones({1, 2}), 1};
                               net.loss(batch, torch::nn::functional::mse_loss).backward();
                             }),
              AllOf(HasSubstr("a BatchNorm cannot train on one sample"), HasSubstr("in a run `drop_last`")));
}

TEST(ErrorTexts, OfALayerThatDoesNotDivideNameItAndWhatWouldFit) {
  EXPECT_THAT(error_on_ranks(3,
                             [](Rank& rank) {
                               shard(torch::nn::Sequential({{"conv", torch::nn::Conv2d(1, 20, 3)}}), rank);
                             }),
              AllOf(HasSubstr("layer conv"), HasSubstr("20 output channels do not divide over 3 ranks"),
                    HasSubstr("1, 2, 4, 5, 10, 20"), HasSubstr("keep the layer whole")));
}

TEST(ErrorTexts, OfAMeshThatDoesNotFitNameThoseThatDo) {
  EXPECT_THAT(error_of([] {
                check_mesh({2, 2, 1}, 2);
              }),
              AllOf(HasSubstr("2 x 2 x 1 (data x pipeline x tensor) does not fit 2 devices"),
                    HasSubstr("2 x 1 x 1, 1 x 2 x 1, 1 x 1 x 2")));
}

// ---- What a task brings.

Task small_task() {
  return {.name = "squares",
          .module = [] { return torch::nn::Linear(2, 1); },
          .criterion = [](const auto& y_hat, const auto& y) { return (y_hat - y).square().mean(); },
          .train = Dataset{torch::ones({8, 2}), torch::ones({8, 1})}};
}

Caught error_of_fit(const Task& task) {
  TrainOptions options;
  options.devices = test_devices(1);
  options.batch.size = 8;
  options.epochs = 1;
  return error_of([&] { fit(task, options); });
}

TEST(ErrorTexts, OfACriterionThatGivesNoMeanSayWhatItGave) {
  Task task = small_task();
  task.criterion = [](const auto& y_hat, const auto& y) { return (y_hat - y).square(); };
  EXPECT_THAT(error_of_fit(task),
              AllOf(HasSubstr("rank 0 (cpu): the criterion of \"squares\" gave a tensor of sizes [8, 1]"),
                    HasSubstr("take its mean")));
}

TEST(ErrorTexts, OfAFunctionThatGivesOtherSamplesSayHowManyWereAskedFor) {
  Task task = small_task();
  task.train = Samples(8, [](const auto&) { return Dataset{torch::ones({3, 2}), torch::ones({3, 1})}; });
  EXPECT_THAT(error_of_fit(task), AllOf(HasSubstr("asked for 8 samples"), HasSubstr("x of sizes [3, 2]")));
}

TEST(ErrorTexts, OfSamplesOfAnotherTypeThanTheNetworkNameBothAndWhatToCall) {
  Task task = small_task();
  task.train = Dataset{torch::ones({8, 2, 1, 1}, torch::kByte), torch::ones({8, 1})};
  task.module = [] {
    torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(2, 1));
    net->to(torch::kDouble);
    return net;
  };
  EXPECT_THAT(error_of_fit(task), AllOf(HasSubstr("the network has parameters of type Double, and x of a batch is of "
                                                  "type Float (images of bytes become Float from 0 to 1)"),
                                        HasSubstr("x.to(torch::kDouble).div(255)"), HasSubstr("dtype")));
}

// ---- Devices, options, the launch.

TEST(ErrorTexts, OfADeviceThatIsNotThereNameThoseThatAre) {
  EXPECT_THAT(error_of([] { check_devices({torch::Device("cuda:99")}); }),
              AllOf(HasSubstr("there is no device cuda:99"), HasSubstr("LibTorch finds")));
}

TEST(ErrorTexts, OfAnOptionNameItsValueAndWhatItMustBe) {
  EXPECT_THAT(error_of([] { run(test_devices(2), [](Rank&) {}, {.threads_per_rank = 0}); }),
              HasSubstr("threads_per_rank is 0; a rank needs at least 1 thread"));
}

TEST(ErrorTexts, OfOptionsThatDoNotGoTogetherSayWhyAndWhatToTakeInstead) {
  EXPECT_THAT(error_of([] { train_options_from_json(R"({"way": {"zero_stage": 2, "compress": "bf16"}})"); }),
              AllOf(HasSubstr("`zero_stage` and `compress` do not go together: they are two ways to share the work"),
                    HasSubstr("; leave one of the two out")));
}

TEST(ErrorTexts, OfAnUnknownModelNameThoseThatAre) {
  EXPECT_THAT(error_of([] { check_model({.name = "vgg"}); }),
              HasSubstr("the model is \"vgg\"; there are lenet, mlp, alexnet, resnet18, gpt"));
}

TEST(ErrorTexts, OfALaunchNameTheVariablesThatLack) {
  const auto variable = [](const char* name) { return std::string(name) == "RANK" ? "0" : nullptr; };
  EXPECT_THAT(error_of([&] { comm::read_launch_environment(variable); }),
              AllOf(HasSubstr("the environment of torchrun or lockstep launch is incomplete"), HasSubstr("WORLD_SIZE"),
                    HasSubstr("Start the program through the launcher")));
}

TEST(ErrorTexts, OfConfigurationsThatDifferInOrderAloneShowBothWhole) {
  const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto error_with = [&](int index, const std::string& configuration) {
    comm::LaunchEnvironment launch{.launcher = "a test", .rank = index, .world_size = 2};
    launch.job = "test";
    return error_of([&] { comm::meet(*store, launch, {torch::kCPU}, configuration, comm::WaitLimit{20s}); });
  };
  std::thread other([&] { EXPECT_THAT(error_with(1, "b, a"), Fails(Error::difference)); });
  EXPECT_THAT(error_with(0, "a, b"), HasSubstr("than process 0: b, a; process 0: a, b. "));
  other.join();
}

// ---- Files.

TEST(ErrorTexts, OfAMissingFileNameItAndTheReason) {
  const ScratchFolder folder;
  EXPECT_THAT(error_of([&] { io::read_text(folder / "none.json"); }),
              AllOf(HasSubstr((folder / "none.json").string()), HasSubstr("No such file")));
}

TEST(ErrorTexts, OfADamagedFileNameItAndTheDamage) {
  const ScratchFolder folder;
  folder.write("a.safetensors", "short");
  EXPECT_THAT(error_of([&] { io::read_safetensors(folder / "a.safetensors"); }),
              AllOf(HasSubstr((folder / "a.safetensors").string()), HasSubstr("too short for a safetensors file")));
}

TEST(ErrorTexts, OfDataThatIsNotThereSayWhereToGetIt) {
  const ScratchFolder folder;
  EXPECT_THAT(error_of([&] { load_fashion_mnist(folder.path()); }),
              AllOf(HasSubstr(folder.path().string()), HasSubstr("train-images-idx3-ubyte")));
}

TEST(ErrorTexts, OfARunsFilesThatWereRemovedNameWhatIsGone) {
  const ScratchFolder folder;
  Task task = small_task();
  task.test = task.train;
  TrainOptions options;
  options.devices = test_devices(1);
  options.batch.size = 8;
  options.epochs = 1;
  const auto error_after = [&](const std::string& run, const std::string& removed) {
    options.keep.run_dir = folder / run;
    const TrainCallbacks callbacks{
        .on_epoch = [&](const EpochMetrics&) { std::filesystem::rename(folder / removed, folder / ("no " + run)); }};
    return error_of([&] { fit(task, options, callbacks); });
  };
  EXPECT_THAT(error_after("moved", "moved"),
              AllOf(HasSubstr((folder / "moved").string() + " is gone"), HasSubstr("so the run is not kept there")));
  EXPECT_THAT(error_after("emptied", "emptied/model.safetensors"), HasSubstr("model.safetensors is gone"));
  EXPECT_THAT(error_of([&] {
                options.keep.run_dir = "/proc/self/run";
                fit(task, options);
              }),
              HasSubstr("cannot make the run's folder /proc/self/run"));
}

}  // namespace error_texts_test
}  // namespace lockstep
