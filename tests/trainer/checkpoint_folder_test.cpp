// Checkpoints on the disk: which are kept, what is refused, and that no failing call and no power cut loses the run.
#include "trainer/checkpoint_folder.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/error_of.hpp"
#include "support/failing_files.hpp"
#include "support/scratch_folder.hpp"

namespace checkpoint_folder_test {

using lockstep::CheckpointFolder;
using lockstep::Error;
using lockstep::error_of;
using lockstep::FailingFiles;
using lockstep::Fails;
using lockstep::newest_checkpoint;
using lockstep::read_checkpoint;
using lockstep::read_run_state;
using lockstep::RunState;
using lockstep::ScratchFolder;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// After `epochs` epochs, with these test accuracies; its weights depend on the position.
RunState state(int epochs, int64_t steps = 0, const std::vector<double>& accuracies = {}) {
  RunState state{.epochs = epochs, .steps = steps, .seconds = 0.1, .history = {}, .config = "{}", .tensors = {}};
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    const double accuracy = accuracies.empty() ? 0.1 * epoch : accuracies[epoch - 1];
    state.history.push_back({.epoch = epoch, .train_loss = 1.0 / (3 * epoch), .test_accuracy = accuracy});
  }
  state.tensors.emplace_back("model.weight", torch::full({300}, epochs + steps / 100.0, torch::kDouble));
  state.tensors.emplace_back("optimizer.step.weight", torch::tensor(int64_t{epochs}));
  return state;
}

void expect_equal(const RunState& found, const RunState& expected) {
  EXPECT_EQ(found.epochs, expected.epochs);
  EXPECT_EQ(found.steps, expected.steps);
  EXPECT_EQ(found.seconds, expected.seconds);
  EXPECT_EQ(found.config, expected.config);
  ASSERT_EQ(found.history.size(), expected.history.size());
  for (size_t i = 0; i < found.history.size(); ++i) {
    EXPECT_EQ(found.history[i].train_loss, expected.history[i].train_loss);
    EXPECT_EQ(found.history[i].test_accuracy, expected.history[i].test_accuracy);
  }
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) {
    const auto same = lockstep::tensors_under(name.substr(0, name.find('.')), found.tensors);
    ASSERT_EQ(same.size(), 1u) << name;
    EXPECT_TRUE(torch::equal(same[0].second, tensor)) << name;
  }
}

TEST(CheckpointFolder, KeepsTheLastAndTheBest) {
  const ScratchFolder run;
  CheckpointFolder folder(run / "checkpoints", 2);
  const std::vector<double> accuracies = {0.5, 0.9, 0.9, 0.4, 0.3};
  for (int epoch = 0; epoch <= 5; ++epoch) {
    if (epoch > 0) folder.write(state(epoch, 0, accuracies));
    if (epoch < 5) folder.write(state(epoch, 10, accuracies));
  }
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(run / "checkpoints")) {
    names.push_back(entry.path().filename());
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("epoch-0002.safetensors", "epoch-0004-step-000010.safetensors",
                                                   "epoch-0005.safetensors"));
  expect_equal(read_checkpoint(newest_checkpoint(run / "checkpoints")), state(5, 0, accuracies));
  expect_equal(read_checkpoint(run / "checkpoints/epoch-0002.safetensors"), state(2, 0, accuracies));
}

TEST(CheckpointFolder, ForgetsTheFutureOfARunThatGoesOnFromAnEarlierOne) {
  const ScratchFolder folder;
  CheckpointFolder checkpoints(folder.path(), 3);
  for (int epoch = 1; epoch <= 3; ++epoch) checkpoints.write(state(epoch));
  folder.write(".epoch-0004.safetensors.abcdefgh.tmp", "of a killed process");
  folder.write("notes.txt", "");
  checkpoints.write(state(1, 7));
  EXPECT_THAT(folder.names(), ElementsAre("epoch-0001-step-000007.safetensors", "epoch-0001.safetensors", "notes.txt"));
}

TEST(CheckpointFolder, RefusesWhatIsDamagedAndNamesTheNewestWholeOne) {
  const ScratchFolder folder;
  CheckpointFolder checkpoints(folder.path(), 3);
  for (int epoch = 1; epoch <= 3; ++epoch) checkpoints.write(state(epoch));
  const std::string whole = folder.read("epoch-0003.safetensors");
  const auto error_with = [&](const std::string& bytes) {
    folder.write("epoch-0003.safetensors", bytes);
    return error_of([&] { read_checkpoint(newest_checkpoint(folder.path())); });
  };
  const auto advice =
      HasSubstr("The newest whole one before it: `resume` " + (folder / "epoch-0002.safetensors").string());
  for (size_t i = 0; i < whole.size(); i += 31) {  // whichever byte it is
    std::string damaged = whole;
    damaged[i] ^= 4;
    EXPECT_THAT(error_with(damaged), AllOf(Fails(Error::file), advice)) << i;
  }
  std::string damaged = whole;
  damaged.back() ^= 1;
  EXPECT_THAT(error_with(damaged), Fails(Error::file));
  EXPECT_THAT(error_with(whole.substr(0, whole.size() / 2)), advice);
  EXPECT_THAT(error_with(""), AllOf(Fails(Error::file), advice));
  folder.write("epoch-0002.safetensors", damaged);
  EXPECT_THAT(error_with(damaged), Fails(Error::file));
  folder.write("epoch-0001.safetensors", "");
  EXPECT_THAT(error_with(damaged), Fails(Error::file));
}

TEST(CheckpointFolder, RefusesWhatIsForeign) {
  const ScratchFolder folder;
  lockstep::io::write_safetensors(folder / "model.safetensors", {{"weight", torch::ones({2})}});
  EXPECT_THAT(error_of([&] { read_checkpoint(folder / "model.safetensors"); }), Fails(Error::file));
}

// Writes the checkpoints of epochs 1 to 3 in turn; the third one's calls go through `files`, which may fail.
bool write_three(const ScratchFolder& run, lockstep::io::FileSystem& files) {
  for (int epoch = 1; epoch <= 2; ++epoch) CheckpointFolder(run / "checkpoints", 1).write(state(epoch));
  try {
    CheckpointFolder(run / "checkpoints", 1, files).write(state(3));
    return true;
  } catch (const lockstep::Error&) {
    return false;
  }
}

int calls_of_a_write() {
  const ScratchFolder run;
  FailingFiles files(-1, FailingFiles::Mode::error);
  EXPECT_TRUE(write_three(run, files));
  EXPECT_THAT(files.log(), testing::IsSupersetOf({"write", "fsync", "rename epoch-0003.safetensors", "sync checkpoints",
                                                  "unlink epoch-0002.safetensors"}));
  return files.calls();
}

TEST(CheckpointFolder, KeepsAWholeCheckpointWhicheverCallFails) {
  const int calls = calls_of_a_write();
  ASSERT_GE(calls, 8);
  for (int call = 0; call < calls; ++call) {
    SCOPED_TRACE(call);
    const ScratchFolder run;
    FailingFiles files(call, FailingFiles::Mode::error);
    const bool written = write_three(run, files);
    const RunState found = read_checkpoint(newest_checkpoint(run / "checkpoints"));
    if (written) EXPECT_EQ(found.epochs, 3);
    EXPECT_GE(found.epochs, 2);
    expect_equal(found, state(found.epochs));
    CheckpointFolder(run / "checkpoints", 1).write(state(4));  // and the run can go on
    EXPECT_EQ(newest_checkpoint(run / "checkpoints").filename(), "epoch-0004.safetensors");
  }
}

TEST(CheckpointFolder, KeepsAWholeCheckpointWheneverThePowerIsCut) {
  const int calls = calls_of_a_write();
  for (const bool eager : {false, true}) {
    for (int call = 0; call <= calls; ++call) {
      SCOPED_TRACE(std::to_string(call) + (eager ? ", eager" : ""));
      const ScratchFolder run;
      FailingFiles files(call, FailingFiles::Mode::power_cut, eager);
      const bool written = write_three(run, files);
      files.crash();
      const RunState found = read_checkpoint(newest_checkpoint(run / "checkpoints"));
      if (written) EXPECT_EQ(found.epochs, 3);  // a checkpoint that was reported as written stays
      EXPECT_GE(found.epochs, 2);
      expect_equal(found, state(found.epochs));
      CheckpointFolder(run / "checkpoints", 1).write(state(4));
      EXPECT_EQ(newest_checkpoint(run / "checkpoints").filename(), "epoch-0004.safetensors");
    }
  }
}

// The same for a run's first checkpoint, whose folder is new: it is there whole, or none is.
TEST(CheckpointFolder, AFirstCheckpointIsWholeOrNotThere) {
  for (int call = 0; call < 10; ++call) {
    const ScratchFolder run;
    FailingFiles files(call, FailingFiles::Mode::power_cut);
    try {
      CheckpointFolder(run / "checkpoints", 1, files).write(state(1));
    } catch (const lockstep::Error&) {
    }
    files.crash();
    const auto newest = newest_checkpoint(run / "checkpoints");
    if (!newest.empty()) expect_equal(read_checkpoint(newest), state(1));
  }
}

}  // namespace checkpoint_folder_test
