// Labels: concurrency long
// Not under sanitizers: Trainer.Learns*
// train() and evaluate_run(): equal results on any number of devices, what is kept, and what bad input leaves behind.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "support/error_of.hpp"
#include "support/report_data.hpp"
#include "support/small_images.hpp"
#include "support/test_devices.hpp"
#include "trainer/train_options.hpp"
#include "trainer/workload.hpp"

#include <fstream>
#include <latch>
#include <set>
#include <thread>

namespace trainer_test {

namespace fs = std::filesystem;
using lockstep::EpochMetrics;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Refused;
using lockstep::ReportData;
using lockstep::ScratchFolder;
using lockstep::TrainOptions;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class Trainer : public testing::Test {
 protected:
  Trainer() { write_small_images(images_, 150, 40); }

  TrainOptions options(int ranks) const {
    TrainOptions options;
    options.data = lockstep::FashionMnist{images_.path()};
    options.devices = lockstep::test_devices(ranks);
    options.batch.size = 32;
    options.epochs = 2;
    return options;
  }

  const ScratchFolder images_;
  const ScratchFolder runs_;
};

TEST_F(Trainer, GivesTheSameMetricsAndWeightsOnAnyNumberOfDevices) {
  TrainOptions single = options(1);
  single.keep.run_dir = runs_ / "1";
  const auto expected = lockstep::train(single);
  ASSERT_EQ(expected.history.size(), 2u);
  lockstep::LeNet net;
  load_weights(single.keep.run_dir / "model.safetensors", *net);
  for (const int ranks : {2, 3, 4}) {
    TrainOptions several = options(ranks);
    several.keep.run_dir = runs_ / std::to_string(ranks);
    const auto result = lockstep::train(several);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(result.history[i].epoch, static_cast<int>(i) + 1);
      EXPECT_NEAR(result.history[i].train_loss, expected.history[i].train_loss, 1e-5);
      EXPECT_NEAR(result.history[i].train_accuracy, expected.history[i].train_accuracy, 1e-9);
      EXPECT_NEAR(result.history[i].test_accuracy, expected.history[i].test_accuracy, 1e-9);
      EXPECT_GT(result.history[i].seconds, 0);
    }
    lockstep::LeNet other;
    load_weights(several.keep.run_dir / "model.safetensors", *other);
    const auto mine = other->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::allclose(mine[item.key()], item.value(), 1e-4, 1e-6)) << item.key();
  }
}

TEST_F(Trainer, TrainsSeveralRunsAtOnceAsOneAfterTheOther) {
  const auto run = [&](int index, const std::string& name, std::latch& start) {
    TrainOptions settings = options(index + 1);
    settings.rate.lr = 0.1 * (index + 1);
    settings.keep.run_dir = runs_ / (name + std::to_string(index));
    lockstep::train(settings, {.on_data = [&](const std::string&) { start.arrive_and_wait(); }});
  };
  for (const int index : {0, 1}) {
    std::latch at_once(1);
    run(index, "alone", at_once);
  }
  std::latch when_both_have_data(2);
  std::thread other([&] { run(0, "beside", when_both_have_data); });
  run(1, "beside", when_both_have_data);
  other.join();
  for (const std::string index : {"0", "1"}) {
    const auto weights = [&](const std::string& name) { return runs_.read(name + index + "/model.safetensors"); };
    EXPECT_TRUE(weights("beside") == weights("alone")) << index;  // not EXPECT_EQ, which would print them
  }
}

TEST_F(Trainer, Learns) {
  const ScratchFolder images;
  write_small_images(images, 2000, 200);
  TrainOptions settings = options(2);
  settings.data = lockstep::FashionMnist{images.path()};
  settings.batch.size = 16;
  settings.epochs = 8;
  const auto result = lockstep::train(settings);
  EXPECT_LT(result.history.back().train_loss, 0.5 * result.history.front().train_loss);
  EXPECT_GT(result.history.back().test_accuracy, 0.5);
}

TEST_F(Trainer, LearnsInBfloat16NearlyAsInFloat32) {
  const ScratchFolder images;
  write_small_images(images, 400, 200);
  TrainOptions settings = options(2);
  settings.data = lockstep::FashionMnist{images.path()};
  settings.batch.size = 16;
  settings.epochs = 1;
  const auto exact = lockstep::train(settings);
  settings.precision = lockstep::Precision::bf16;
  settings.keep.run_dir = runs_ / "bf16";
  const auto rounded = lockstep::train(settings);
  EXPECT_NE(rounded.history[0].train_loss, exact.history[0].train_loss);
  EXPECT_NEAR(rounded.history[0].train_loss, exact.history[0].train_loss, 0.01);

  lockstep::LeNet net;
  load_weights(settings.keep.run_dir / "model.safetensors", *net);  // refuses another type than float32
  lockstep::EvalOptions eval;
  eval.devices = lockstep::test_devices(3);
  const auto score = lockstep::evaluate_run(settings.keep.run_dir, eval);
  EXPECT_EQ(score.accuracy(), rounded.history.back().test_accuracy);
  settings.precision = lockstep::Precision::float32;
  runs_.write("bf16/config.json", to_json(settings));
  EXPECT_NE(lockstep::evaluate_run(settings.keep.run_dir, eval).loss, score.loss);

  settings.model.name = "mlp";  // LeNet rests for some 200 steps first
  settings.model.width = 0.25;
  settings.rate.lr = 0.05;
  settings.precision = lockstep::Precision::bf16;
  settings.epochs = 20;
  settings.keep.run_dir = runs_ / "mlp";
  const auto learnt = lockstep::train(settings);
  EXPECT_LT(learnt.history.back().train_loss, 0.5 * learnt.history.front().train_loss);
  EXPECT_GT(learnt.history.back().test_accuracy, 0.5);
}

TEST_F(Trainer, GivesTheSameInBothMemoryFormats) {
  TrainOptions settings = options(2);
  settings.memory_format = lockstep::MemoryFormat::contiguous;
  settings.keep.run_dir = runs_ / "contiguous";
  const auto expected = lockstep::train(settings);
  settings.memory_format = lockstep::MemoryFormat::channels_last;
  settings.keep.run_dir = runs_ / "channels-last";
  const auto result = lockstep::train(settings);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(result.history[i].train_loss, expected.history[i].train_loss, 1e-5);
    EXPECT_NEAR(result.history[i].test_accuracy, expected.history[i].test_accuracy, 1e-9);
  }
  lockstep::LeNet net, other;
  load_weights(runs_ / "contiguous/model.safetensors", *net);
  load_weights(runs_ / "channels-last/model.safetensors", *other);
  const auto theirs = other->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(torch::allclose(theirs[item.key()], item.value(), 1e-4, 1e-6)) << item.key();
  EXPECT_EQ(lockstep::evaluate_run(settings.keep.run_dir).accuracy(), result.history.back().test_accuracy);
}

// A run of each model, made small, with its weights and metrics.
class EveryModel : public Trainer {
 protected:
  TrainOptions options(const lockstep::ModelOptions& model, const std::string& name) const {
    TrainOptions settings = Trainer::options(2);
    settings.model = model;
    settings.rate.lr = 0.05;
    settings.keep.run_dir = runs_ / name;
    return settings;
  }
  const std::vector<lockstep::ModelOptions> models_ = {
      {.name = "mlp", .width = 0.1},
      {.name = "alexnet", .width = 0.05, .image_size = 65, .groups = 2},
      {.name = "resnet18", .width = 0.05}};
};

TEST_F(EveryModel, TrainsTheSameBitsTwiceAndEvaluatesOnAnyNumberOfDevices) {
  for (const auto& model : models_) {
    SCOPED_TRACE(to_string(model));
    const auto first = lockstep::train(options(model, model.name + "-1"));
    const auto second = lockstep::train(options(model, model.name + "-2"));
    EXPECT_EQ(runs_.read(model.name + "-1/model.safetensors"), runs_.read(model.name + "-2/model.safetensors"));
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(std::isfinite(first.history[i].train_loss));
      EXPECT_EQ(first.history[i].train_loss, second.history[i].train_loss);
      EXPECT_EQ(first.history[i].test_accuracy, second.history[i].test_accuracy);
    }
    EXPECT_NE(first.history[0].train_loss, first.history[1].train_loss);
    for (const int ranks : {1, 3}) {
      lockstep::EvalOptions eval;
      eval.devices = lockstep::test_devices(ranks);
      EXPECT_DOUBLE_EQ(lockstep::evaluate_run(runs_ / (model.name + "-1"), eval).accuracy(),
                       first.history.back().test_accuracy);
    }
  }
}

TEST_F(EveryModel, TrainsInBfloat16AndChannelsLastNearlyTheSame) {
  for (const auto& model : models_) {
    SCOPED_TRACE(to_string(model));
    TrainOptions settings = options(model, model.name + "-float");
    settings.epochs = 1;
    settings.rate.lr = 1e-4;  // a larger one carries rounding from step to step
    settings.memory_format = lockstep::MemoryFormat::contiguous;
    const auto expected = lockstep::train(settings).history[0].train_loss;
    settings.memory_format = lockstep::MemoryFormat::channels_last;
    settings.keep.run_dir = runs_ / (model.name + "-last");
    EXPECT_NEAR(lockstep::train(settings).history[0].train_loss, expected, 1e-3);
    settings.precision = lockstep::Precision::bf16;
    settings.keep.run_dir = runs_ / (model.name + "-bf16");
    const auto rounded = lockstep::train(settings).history[0];
    EXPECT_NEAR(rounded.train_loss, expected, 0.1);
    EXPECT_NE(rounded.train_loss, expected);
    EXPECT_DOUBLE_EQ(lockstep::evaluate_run(settings.keep.run_dir).accuracy(), rounded.test_accuracy);
  }
}

TEST_F(Trainer, MeasuresHowLongRanksWaitForData) {
  const auto result = lockstep::train(options(2));
  double seconds = 0, waited = 0;
  for (const auto& metrics : result.history) {
    EXPECT_GT(metrics.data_wait, 0);
    EXPECT_LT(metrics.data_wait, 0.5);  // some 10 microseconds of a step of milliseconds
    seconds += metrics.seconds;
    waited += metrics.seconds * metrics.data_wait;
  }
  EXPECT_NEAR(result.data_wait(), waited / seconds, 1e-12);
}

TEST_F(Trainer, KeepsTheRunAndItsConfigurationRunsAgain) {
  TrainOptions settings = options(2);
  settings.keep.run_dir = runs_ / "deep" / "run";
  settings.seed = 3;
  int epochs_seen = 0;
  int64_t done = 0;
  lockstep::TrainCallbacks callbacks;
  callbacks.on_epoch = [&](const EpochMetrics& metrics) {
    EXPECT_EQ(metrics.epoch, ++epochs_seen);
    EXPECT_EQ(lockstep::read_metrics(settings.keep.run_dir / "metrics.jsonl").size(),
              static_cast<size_t>(epochs_seen));  // written before
    EXPECT_TRUE(fs::exists(settings.keep.run_dir / "report.html"));
  };
  callbacks.on_step = [&](const lockstep::StepProgress& progress) {
    EXPECT_EQ(progress.total, 150);
    done = progress.done;
  };
  const auto result = lockstep::train(settings, callbacks);
  EXPECT_EQ(epochs_seen, 2);
  EXPECT_EQ(done, 150);  // the end of an epoch is always reported
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(settings.keep.run_dir)) names.push_back(entry.path().filename());
  EXPECT_THAT(names, testing::UnorderedElementsAre(".lock", "config.json", "metrics.jsonl", "model.safetensors",
                                                   "notes.json", "report.html", "checkpoints"));

  std::ifstream file(settings.keep.run_dir / "config.json");
  TrainOptions again = lockstep::train_options_from_json({std::istreambuf_iterator<char>(file), {}});
  EXPECT_EQ(again.keep.run_dir, settings.keep.run_dir);
  again.keep.run_dir = runs_ / "again";
  const auto repeated = lockstep::train(again);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(repeated.history[i].train_loss, result.history[i].train_loss);  // the same bits
    EXPECT_EQ(repeated.history[i].test_accuracy, result.history[i].test_accuracy);
  }
}

TEST_F(Trainer, EvaluatesAKeptRunExactlyOnAnyNumberOfDevices) {
  TrainOptions settings = options(2);
  settings.keep.run_dir = runs_ / "run";
  const auto result = lockstep::train(settings);
  for (const int ranks : {1, 2, 3, 7}) {
    lockstep::EvalOptions eval;
    eval.devices = lockstep::test_devices(ranks);
    eval.batch_size = 11;
    const auto score = lockstep::evaluate_run(settings.keep.run_dir, eval);
    EXPECT_EQ(score.total, 40);
    EXPECT_DOUBLE_EQ(score.accuracy(), result.history.back().test_accuracy);
  }
}

TEST_F(Trainer, ARequestToStopKeepsTheFinishedEpochs) {
  TrainOptions settings = options(2);
  settings.keep.run_dir = runs_ / "run";
  settings.epochs = 1000;
  std::stop_source stop;
  lockstep::TrainCallbacks callbacks;
  callbacks.stop = stop.get_token();
  callbacks.on_epoch = [&](const EpochMetrics& metrics) {
    if (metrics.epoch == 2) stop.request_stop();
  };
  const auto result = lockstep::train(settings, callbacks);
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.history.size(), 2u);
  EXPECT_EQ(lockstep::read_metrics(settings.keep.run_dir / "metrics.jsonl").size(), 2u);
  const ReportData report(settings.keep.run_dir / "report.html");
  EXPECT_EQ(report.run()["metrics"].size(), 2u);
  EXPECT_EQ(report.run()["notes"]["end"], "stopped by request");
  EXPECT_EQ(lockstep::evaluate_run(settings.keep.run_dir).total, 40);
}

TEST_F(Trainer, TheReportHasWhatOnlyTheRunKnew) {
  TrainOptions settings = options(2);
  settings.keep.run_dir = runs_ / "run";
  settings.keep.trace = runs_ / "trace.json";
  settings.batch.size = 5;
  settings.batch.balance = std::vector<double>{4, 1};
  settings.epochs = 1;
  const auto result = lockstep::train(settings, {.on_warning = [](const std::string&) {}});
  const EpochMetrics& epoch = result.history[0];
  ASSERT_EQ(epoch.ranks.size(), 2u);
  EXPECT_DOUBLE_EQ(std::max(epoch.ranks[0].data_wait, epoch.ranks[1].data_wait), epoch.data_wait * epoch.seconds);
  for (const auto& rank : epoch.ranks) {
    EXPECT_GT(rank.rank_wait, 0);
    EXPECT_LE(rank.data_wait + rank.rank_wait, epoch.seconds);
  }
  const ReportData report(settings.keep.run_dir / "report.html");
  const auto& run = report.run();
  EXPECT_EQ(run["metrics"][0]["weights"], result.history[0].weights);
  EXPECT_EQ(run["metrics"][0]["ranks"]["rank_wait"].size(), 2u);
  EXPECT_GT(run["metrics"][0]["ranks"]["memory"][1], 1e6);
  const auto& notes = run["notes"];
  EXPECT_EQ(notes["ranks"].size(), 2u);
  EXPECT_EQ(notes["samples"], (std::vector<int>{4, 1}));
  ASSERT_EQ(notes["tensors"].size(), 1u);  // both hold the whole network
  EXPECT_THAT(notes["tensors"][0].get<std::string>(), testing::StartsWith("conv1.weight 20 1 3 3\nconv1.bias 20\n"));
  EXPECT_EQ(run["shapes"]["conv1.weight"], (std::vector<int>{20, 1, 3, 3}));
  for (const char* rank : {"0", "1"}) {
    std::set<std::string> names;
    for (const auto& range : notes["timeline"]["ranks"][rank]) names.insert(range[0].get<std::string>());
    EXPECT_THAT(names, testing::IsSupersetOf({"forward", "backward", "update", "bucket 0 allreduce"})) << rank;
  }
}

TEST_F(Trainer, AReportThatCannotBeWrittenIsAWarning) {
  TrainOptions settings = options(1);
  settings.keep.run_dir = runs_ / "run";
  std::vector<std::string> warnings;
  lockstep::TrainCallbacks callbacks;
  callbacks.on_data = [&](const std::string&) { fs::create_directories(settings.keep.run_dir / "report.html" / "in"); };
  callbacks.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  EXPECT_EQ(lockstep::train(settings, callbacks).history.size(), 2u);
  ASSERT_FALSE(warnings.empty());
  EXPECT_THAT(warnings[0], HasSubstr("report.html"));
}

TEST_F(Trainer, ASplitRunsReportSaysWhichRankHasWhichSlices) {
  TrainOptions settings = options(2);
  settings.keep.run_dir = runs_ / "run";
  settings.way = lockstep::SplitNetwork{{.mesh = {.data = 1, .pipeline = 2, .tensor = 1}, .microbatches = 2}};
  lockstep::train(settings);
  const ReportData report(settings.keep.run_dir / "report.html");
  const auto& tensors = report.run()["notes"]["tensors"];
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_THAT(tensors[0].get<std::string>(), testing::StartsWith("conv1.weight "));
  EXPECT_THAT(tensors[0].get<std::string>(), Not(HasSubstr("fc2.weight")));
  EXPECT_THAT(tensors[1].get<std::string>(), HasSubstr("fc2.weight 10 "));
}

TEST_F(Trainer, BadInputIsRefusedWithNothingWritten) {
  const auto refused = [&](auto change) {
    TrainOptions settings = options(2);
    settings.keep.run_dir = runs_ / "run";
    change(settings);
    const auto text = error_of([&] { lockstep::train(settings); });
    EXPECT_THAT(runs_.names(), testing::IsEmpty()) << text;
    return text;
  };
  EXPECT_THAT(refused([](auto& o) { o.rate.lr = std::nan(""); }), Refused("lr"));
  EXPECT_THAT(refused([](auto& o) { o.model.name = "vgg"; }), Refused("model"));
  EXPECT_THAT(refused([](auto& o) { o.batch.size = 151; }), Refused("batch_size"));
  EXPECT_THAT(refused([](auto& o) { o.devices = {torch::Device("cuda:77")}; }), Refused("devices"));
  EXPECT_THAT(refused([&](auto& o) { o.data = lockstep::FashionMnist{runs_.path()}; }), Fails(Error::file));
  EXPECT_THAT(refused([](auto& o) { o.keep.run_dir = "/proc/self/run"; }), Fails(Error::file));
  images_.write("t10k-labels-idx1-ubyte", lockstep::idx_bytes({40}, std::string(40, '\x0a')));
  EXPECT_THAT(refused([](auto&) {}), Fails(Error::file));
}

TEST_F(Trainer, WarningsGoToStderrIfNobodyWantsToBeTold) {
  TrainOptions settings = options(1);
  settings.epochs = 1;
  settings.batch.grain = {8, 0.5};
  testing::internal::CaptureStderr();
  lockstep::train(settings);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("lockstep: `check_arithmetic` has grains"));
}

TEST_F(Trainer, KeepsARunBehindALinkToAMissingFolder) {
  TrainOptions settings = options(1);
  settings.epochs = 1;
  fs::create_symlink(runs_ / "disk" / "folder", runs_ / "link");
  settings.keep.run_dir = runs_ / "link" / "run";
  lockstep::train(settings);
  EXPECT_TRUE(fs::exists(runs_ / "disk/folder/run/model.safetensors"));
  fs::create_symlink(runs_ / "disk" / "other", runs_ / "run");
  settings.keep.run_dir = runs_ / "run";
  lockstep::train(settings);
  EXPECT_TRUE(fs::exists(runs_ / "disk/other/model.safetensors"));
  EXPECT_TRUE(fs::is_symlink(runs_ / "run"));
}

TEST_F(Trainer, WhatWasRemovedMeanwhileIsNotSaidToBeKept) {
  TrainOptions settings = options(1);
  settings.keep.run_dir = runs_ / "run";
  std::function<void()> remove;
  std::vector<std::string> warnings;
  lockstep::TrainCallbacks callbacks;
  callbacks.on_epoch = [&](const EpochMetrics& metrics) {
    if (metrics.epoch == settings.epochs) remove();
  };
  callbacks.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  remove = [&] { fs::remove(settings.keep.run_dir / "config.json"); };
  lockstep::train(settings, callbacks);
  EXPECT_THAT(warnings, testing::Contains(AllOf(HasSubstr("config.json"), HasSubstr("is written again"))));
  EXPECT_EQ(lockstep::evaluate_run(settings.keep.run_dir).total, 40);

  settings.keep.run_dir = runs_ / "moved";
  remove = [&] { fs::rename(runs_ / "moved", runs_ / "away"); };
  EXPECT_THAT(error_of([&] { lockstep::train(settings, callbacks); }), Fails(Error::file));
  EXPECT_EQ(lockstep::evaluate_run(runs_ / "away").total, 40);

  settings.keep.run_dir = runs_ / "emptied";
  remove = [&] { fs::remove(settings.keep.run_dir / "model.safetensors"); };
  EXPECT_THAT(error_of([&] { lockstep::train(settings, callbacks); }), Fails(Error::file));
}

TEST_F(Trainer, NeverWritesIntoAnEarlierRun) {
  TrainOptions settings = options(1);
  settings.keep.run_dir = runs_ / "run";
  settings.epochs = 1;
  lockstep::train(settings);
  const auto before = runs_.read("run/metrics.jsonl");
  EXPECT_THAT(error_of([&] { lockstep::train(settings); }), Fails(Error::file, {}, {"run_dir"}));
  EXPECT_EQ(runs_.read("run/metrics.jsonl"), before);
}

// In a process of its own, since a limit on file sizes is the whole process's: 300 KB is too little for the weights.
TEST_F(Trainer, AFullDiskEndsTheRunAndLeavesEarlierFilesReadable) {
  TrainOptions settings = options(1);
  settings.epochs = 3;
  settings.keep.run_dir = runs_ / "run";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    lockstep::TrainCallbacks callbacks;
    callbacks.on_epoch = [](const EpochMetrics&) {
      const rlimit limit{300'000, 300'000};
      setrlimit(RLIMIT_FSIZE, &limit);
    };
    const auto error = error_of([&] { lockstep::train(settings, callbacks); });
    _exit(error.data && error.data->cause == Error::file ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(lockstep::read_metrics(settings.keep.run_dir / "metrics.jsonl").size(), 1u);  // the second has no weights
  lockstep::EvalOptions eval;
  eval.devices = lockstep::test_devices(1);
  EXPECT_EQ(lockstep::evaluate_run(settings.keep.run_dir, eval).total, 40);
  for (const auto& entry : fs::directory_iterator(settings.keep.run_dir))
    EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
}

// Each in a process of its own, since peak memory is a whole process's. 47 MB of images as bytes would be 188 as float.
int64_t peak_memory_of_a_start(const TrainOptions& settings) {
  const pid_t child = fork();
  if (child == 0) {
    at::set_num_threads(1);  // LibTorch makes its threads anew after a fork(), which the ranks must not ask at once
    std::stop_source stop;
    lockstep::TrainCallbacks callbacks;
    callbacks.stop = stop.get_token();
    callbacks.on_step = [&](const lockstep::StepProgress&) { stop.request_stop(); };
    _exit(lockstep::train(settings, callbacks).stopped ? 0 : 1);
  }
  int status = 0;
  rusage usage{};
  EXPECT_EQ(wait4(child, &status, 0, &usage), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  return usage.ru_maxrss * 1024;
}

TEST_F(Trainer, ImagesAreInMemoryOnceForAllRanks) {
  constexpr int64_t images = 60'000, pixels = 28 * 28;
  images_.write("train-images-idx3-ubyte", lockstep::idx_bytes({images, 28, 28}, std::string(images * pixels, 'x')));
  images_.write("train-labels-idx1-ubyte", lockstep::idx_bytes({images}, std::string(images, '\1')));
  const auto one = peak_memory_of_a_start(options(1));
  const auto four = peak_memory_of_a_start(options(4));
  EXPECT_LT(four - one, images * pixels * 4 / 2);  // not even half a copy as float for three ranks more
}

TEST_F(Trainer, WarnsOfTheDigitsOfMnistInFashionMnistsFiles) {
  TrainOptions settings = options(1);
  settings.epochs = 1;
  const lockstep::ImageData data = lockstep::load_data(settings.data);
  lockstep::DataDigests digests = lockstep::digests_of(data);
  std::string announcement, title;
  std::vector<std::string> warnings;
  const auto run = [&] {
    warnings.clear();
    lockstep::TrainCallbacks callbacks;
    callbacks.on_data = [&](const std::string& text) { announcement = text; };
    callbacks.on_warning = [&](const std::string& text) { warnings.push_back(text); };
    run_workload(lockstep::checked(settings), callbacks, [&] {
      lockstep::Workload workload = workload_of_images(settings, data, digests);
      title = workload.title;
      return workload;
    });
  };
  const std::string folder = images_.path().string();
  run();
  EXPECT_THAT(warnings, testing::IsEmpty());
  EXPECT_EQ(announcement, folder + " (not the images as published)");

  digests.train_images = "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db";
  run();
  EXPECT_THAT(warnings, ElementsAre("the files in " + folder +
                                    " have Fashion-MNIST's names, but hold the digits of MNIST; if clothes are meant, "
                                    "put Fashion-MNIST's files there"));
  EXPECT_EQ(announcement, folder + " (the digits of MNIST)");
  EXPECT_EQ(title, "lenet on fashion-mnist (the digits of MNIST)");
}

TEST_F(Trainer, ARunThatFailsInItsFirstEpochLeavesNothing) {
  TrainOptions settings = options(2);
  settings.keep.run_dir = runs_ / "new" / "run";
  const auto fail = [&] {
    lockstep::TrainCallbacks callbacks;
    callbacks.on_step = [](const lockstep::StepProgress&) { throw Error("enough", {Error::user_code}); };
    return error_of([&] { lockstep::train(settings, callbacks); });
  };
  EXPECT_THAT(fail(), Fails(Error::user_code));
  EXPECT_THAT(runs_.names(), testing::IsEmpty());
  // A folder that was there before stays, and what else is in it.
  fs::create_directory(runs_ / "new");
  runs_.write("new/notes.txt", "");
  EXPECT_THAT(fail(), Fails(Error::user_code));
  EXPECT_THAT(runs_.names(), ElementsAre("new"));
  EXPECT_FALSE(fs::exists(settings.keep.run_dir));
  EXPECT_TRUE(fs::exists(runs_ / "new/notes.txt"));
}

TEST(EvaluateRun, SaysWhatIsMissing) {
  const ScratchFolder folder;
  EXPECT_THAT(error_of([&] { lockstep::evaluate_run(folder / "none"); }), Fails(Error::file, {}, {"run_dir"}));
  folder.write("config.json", R"({"data": "synthetic", "devices": "cpu"})");
  EXPECT_THAT(error_of([&] { lockstep::evaluate_run(folder.path()); }), Fails(Error::file, {}, {"run_dir"}));
}

}  // namespace trainer_test
