// take_over(): what a process of an elastic job does with the folder of a run whose keeper is gone.
#include "trainer/take_over.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "io/atomic_file.hpp"
#include "io/folder_lock.hpp"
#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "trainer/train_options.hpp"

#include <chrono>
#include <thread>

namespace take_over_test {

using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::RunFolder;
using lockstep::ScratchFolder;
using lockstep::TrainOptions;

TrainOptions options_of(const ScratchFolder& scratch) {
  TrainOptions options{.devices = {c10::Device(c10::kCPU)}};
  options.keep.run_dir = scratch / "run";
  return options;
}

lockstep::RunState state_after(int64_t steps) {
  return {.epochs = 0,
          .steps = steps,
          .seconds = 0.1,
          .history = {},
          .config = "{}",
          .tensors = {{"model.weight", torch::ones({3})}}};
}

// Leaves the folder of a process that is killed after it has begun the run.
void begin_and_be_killed(const TrainOptions& options) {
  std::filesystem::create_directory(options.keep.run_dir);
  ASSERT_TRUE(lockstep::io::create_file(options.keep.run_dir / lockstep::kConfigFile));
}

TEST(TakeOver, BeginsAnewWhatWasBegunBeforeAllHadMet) {
  const ScratchFolder scratch;
  const TrainOptions options = options_of(scratch);
  begin_and_be_killed(options);
  std::optional<RunFolder> folder;
  EXPECT_FALSE(take_over(folder, options, {}, {.patience = std::chrono::seconds(1)}));
  folder->keep(state_after(5));
  folder.reset();
  EXPECT_FALSE(lockstep::newest_checkpoint(options.keep.run_dir / lockstep::kCheckpointFolder).empty());
}

TEST(TakeOver, GoesOnWithARunThatItHasTrainedWith) {
  const ScratchFolder scratch;
  const TrainOptions options = options_of(scratch);
  begin_and_be_killed(options);
  lockstep::CheckpointFolder(options.keep.run_dir / lockstep::kCheckpointFolder, 2).write(state_after(5));
  std::optional<RunFolder> folder;
  EXPECT_TRUE(take_over(folder, options, {}, {.met = true, .patience = std::chrono::seconds(1)}));
  EXPECT_FALSE(lockstep::newest_checkpoint(options.keep.run_dir / lockstep::kCheckpointFolder).empty());
}

TEST(TakeOver, ARunThatItHasNotTrainedWithIsRefusedAndStays) {
  const ScratchFolder scratch;
  const TrainOptions options = options_of(scratch);
  begin_and_be_killed(options);
  const auto checkpoints = options.keep.run_dir / lockstep::kCheckpointFolder;
  lockstep::CheckpointFolder(checkpoints, 2).write(state_after(5));
  std::optional<RunFolder> folder;
  const auto taken = [&] { take_over(folder, options, {}, {.patience = std::chrono::seconds(1)}); };
  EXPECT_THAT(error_of(taken), Fails(Error::file));
  EXPECT_FALSE(lockstep::newest_checkpoint(checkpoints).empty());
}

TEST(TakeOver, WhoStillHasTheLockIsWaitedForAndKeepsItsFiles) {
  const ScratchFolder scratch;
  const TrainOptions options = options_of(scratch);
  RunFolder keeper(options.keep.run_dir);
  keeper.create(options, {}, {});
  std::optional<RunFolder> folder;
  const auto taken = [&] { take_over(folder, options, {}, {.met = true, .patience = std::chrono::milliseconds(200)}); };
  EXPECT_THAT(error_of(taken), Fails(Error::file));
  EXPECT_TRUE(std::filesystem::exists(options.keep.run_dir / lockstep::kConfigFile));
}

TEST(TakeOver, GoesOnOnceWhoHadTheLockIsGone) {
  const ScratchFolder scratch;
  const TrainOptions options = options_of(scratch);
  begin_and_be_killed(options);
  std::optional<lockstep::io::FolderLock> of_keeper(std::in_place);
  ASSERT_TRUE(of_keeper->take(options.keep.run_dir));
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    of_keeper.reset();
  });
  std::optional<RunFolder> folder;
  EXPECT_TRUE(take_over(folder, options, {}, {.met = true}));
  ends.join();
}

}  // namespace take_over_test
