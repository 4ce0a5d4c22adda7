// Labels: processes program thorough
// A process of a job that is killed in an evaluation, or while it writes a checkpoint: the others end soon, and say
// where they were, or go on to the same bits if the job is elastic. Nothing is left.
#include "elastic_fixture.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace killed_in_an_epoch_test {

using namespace lockstep;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// With this process killed, all others say so, and where they were.
void expect_named(const std::vector<Finished>& processes, const Kind& kind, int victim) {
  for (int process = 0; process < static_cast<int>(processes.size()); ++process) {
    if (!kind.launched && process == victim) continue;
    const Finished& other = processes[process];
    const std::string gone = "the process of rank " + std::to_string(victim) + " [(]cpu[)] is gone: ";
    EXPECT_THAT(other.err, ContainsRegex(gone + (kind.launched ? "it was ended by signal 9 [(]Killed[)]" : "")));
    EXPECT_THAT(other.err,
                ContainsRegex("rank [0-2] [(]cpu[)] was in [a-z]+.*; the last complete step was step [1-9]"));
    EXPECT_NE(other.code, 0);
  }
}

class KilledInAnEpoch : public Elastic {
 protected:
  // Counts the calls that change this folder, and kills the process that makes the one with number `at`.
  Words with_fault(const std::string& folder, int at, const ScratchFolder& count) const {
    return {"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_FILES"), "FAULT_FOLDER=" + folder,
            "FAULT_AT=" + std::to_string(at), "FAULT_FILE=" + (count / "calls").string()};
  }

  static bool has_faults() { return std::getenv("LOCKSTEP_FAULTY_FILES") != nullptr; }  // not with sanitizers

  // The best of three: a machine may be busy.
  static void expect_soon(const std::function<Seconds()>& took) {
    Seconds best = took();
    for (int i = 1; i < 3 && best >= kSoon; ++i) best = std::min(best, took());
    EXPECT_LT(best, kSlowdown * kSoon);
  }
};

TEST_F(KilledInAnEpoch, InAnEvaluationItIsNamedByTheOthersSoon) {
  side_by_side(static_cast<int>(kKinds.size()), [&](int number) {
    const Kind& kind = kKinds[number];
    const int victim = number % 2;
    SCOPED_TRACE(name_of(kind) + ", rank " + std::to_string(victim) + " killed");
    expect_soon([&] {
      const ScratchFolder folder;
      RunningJob job(kind.processes, kind.launched,
                     {ranks_program(), "dies_in_an_evaluation", "cpu", std::to_string(victim) + " run"}, folder.path());
      EXPECT_TRUE(job.wait_for("evaluates"));
      const auto death = RunningJob::Clock::now();
      const auto ended = job.finish();
      const Seconds took = RunningJob::Clock::now() - death;
      expect_named(ended, kind, victim);
      EXPECT_THAT(job.leftovers(), IsEmpty());
      return took;
    });
  });
}

TEST_F(KilledInAnEpoch, InAnEvaluationOfAnElasticJobItChangesNoBit) {
  Program killed(job_of(2, {}, {ranks_program(), "dies_in_an_evaluation", "cpu", "0 runs/killed"}), watched());
  const auto ended = killed.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 0 was ended by signal 9"), Not(HasSubstr("error:"))));
  EXPECT_THAT(leftovers(), IsEmpty());

  auto undisturbed = watched();
  undisturbed.program = ranks_program();
  ASSERT_EQ(run_program({"dies_in_an_evaluation", "cpu", "-1 runs/undisturbed"}, undisturbed).code, 0);
  expect_same_epochs("killed", 3);
}

const char* const kCheckpoints = "runs/a/checkpoints";
const char* const kWeights = "runs/a/model.safetensors";

TEST_F(KilledInAnEpoch, WhileItWritesACheckpointItIsNamedByTheOthersSoon) {
  if (!has_faults()) GTEST_SKIP() << "not with sanitizers";
  const Words words = train({"--devices", "cpu", "--model", "mlp", "--width", "0.125", "--checkpoint-every", "3",
                             "--grain", "8", "--name", "a", "--resume", "auto"});
  const ScratchFolder count;
  auto undisturbed = surroundings();
  for (const auto& variable : with_fault(kCheckpoints, 0, count)) undisturbed.environment.push_back(variable);
  ASSERT_EQ(run_program(words, undisturbed).code, 0);
  const std::string expected = work_.read(kWeights);
  const int calls = static_cast<int>(count.read("calls.count").size());
  ASSERT_GT(calls, 40);

  side_by_side(static_cast<int>(kKinds.size()), [&](int number) {
    const Kind& kind = kKinds[number];
    const int at = calls * (2 * number + 1) / (2 * static_cast<int>(kKinds.size()));
    SCOPED_TRACE(name_of(kind) + ", call " + std::to_string(at) + " of " + std::to_string(calls));
    expect_soon([&] {
      const ScratchFolder folder, count_of_job;
      RunningJob job(kind.processes, kind.launched, Words{from_environment("LOCKSTEP_PROGRAM")} + words, folder.path(),
                     with_fault(kCheckpoints, at, count_of_job));
      const auto ended = job.finish();
      const auto end = std::filesystem::file_time_type::clock::now();
      expect_named(ended, kind, /*victim=*/0);
      EXPECT_THAT(job.leftovers(), IsEmpty());
      const auto resumed = run_program(words, {.folder = folder.path(), .environment = surroundings().environment});
      EXPECT_EQ(resumed.code, 0) << resumed.err;
      EXPECT_EQ(folder.read(kWeights), expected);
      for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
        EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
      }
      return Seconds(end - std::filesystem::last_write_time(count_of_job / "calls.count"));  // nobody else writes there
    });
  });
}

TEST_F(KilledInAnEpoch, WhileItWritesACheckpointOfAnElasticJobItChangesNoBit) {
  if (!has_faults()) GTEST_SKIP() << "not with sanitizers";
  const ScratchFolder count;
  auto surroundings = watched();
  for (const auto& variable : with_fault("runs/killed/checkpoints", /*at=*/60, count))
    surroundings.environment.push_back(variable);
  const Words more = {"--epochs", "6", "--checkpoint-every", "3"};
  const auto ended = run_program(job(2, {}, "killed", more), surroundings);
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 0 was ended by signal 9"), Not(HasSubstr("error:"))));
  EXPECT_THAT(leftovers(), IsEmpty());
  ASSERT_EQ(run_program(settings("undisturbed", "cpu") + more, watched()).code, 0);
  expect_same_epochs("killed", 6);
}

}  // namespace killed_in_an_epoch_test
