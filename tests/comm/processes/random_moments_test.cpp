// Labels: processes program long repeated
// A process that is killed, and a job that is asked to stop, at random moments between the start of the processes and
// their end: all others end soon, say why, and nothing is left.
#include "cli/cli_fixture.hpp"
#include "running_job.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace random_moments_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using Clock = std::chrono::steady_clock;

struct Outcome {
  bool came_about = false;  // or all had ended before
  std::vector<Finished> processes = {};
  Seconds took = {};  // from the signal to the last process's end
  Words leftovers = {};
  std::string text = {};

  const Finished& of(const Kind& kind, int process) const { return processes[kind.launched ? 0 : process]; }
};

Outcome disturb(const Kind& kind, const Words& words, const std::filesystem::path& folder, const Seconds& moment,
                const std::string& patience, const std::function<bool(RunningJob&)>& act) {
  RunningJob job(kind.processes, kind.launched, words, folder, {}, patience);
  job.wait_for_processes();
  std::this_thread::sleep_for(moment);
  Outcome outcome{.came_about = act(job)};
  const auto start = Clock::now();
  outcome.processes = job.finish();
  outcome.took = Clock::now() - start;
  outcome.leftovers = job.leftovers();
  outcome.text = name_of(kind) + ", after " + std::to_string(moment.count()) + " s, then " +
                 std::to_string(outcome.took.count()) + " s:\n";
  for (const auto& process : outcome.processes) outcome.text += process.out + process.err;
  return outcome;
}

// Each kind's moments are those of `seed` in the order in which they are drawn.
struct Moment {
  size_t kind;
  Seconds time;
  int victim;
};

std::vector<Moment> moments(int count, const Calibration& calibration, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Moment> all;
  for (int i = 0; i < count; ++i) {
    const size_t kind = i % kKinds.size();
    const double part = std::uniform_real_distribution<double>(0, 1)(random);
    const int victim = std::uniform_int_distribution<int>(0, kKinds[kind].processes - 1)(random);
    all.push_back({kind, part * calibration.times[kind], victim});
  }
  return all;
}

// `share_of_limit` gives which part of its limit the end of a job took; 0: it had ended before. Beside others the
// machine may stand still for a moment, and starting a process costs it half a second of both cores. So what was late
// there is tried again, alone, and must then be in time. Nothing may take so long that a timeout has ended it.
void expect_in_time(int count, const std::function<double(int)>& share_of_limit) {
  std::vector<double> shares(count);
  side_by_side(count, [&](int i) {
    shares[i] = share_of_limit(i);
    EXPECT_LT(shares[i], 4);
  });
  for (int i = 0; i < count; ++i) {
    const double beside_others = shares[i];
    for (int again = 0; again < 2 && shares[i] >= 1; ++again) shares[i] = share_of_limit(i);
    EXPECT_LT(shares[i], 1) << "number " << i << ", beside others " << beside_others;
  }
}

TEST(RandomMoments, AKilledProcessIsNamedByAllOthersSoonAndNothingIsLeft) {
  const Words words = {ranks_program(), "lives"};
  const Calibration calibration(words, 1500ms);
  const auto all = moments(50, calibration, 16);
  std::atomic<int> named{0};
  expect_in_time(static_cast<int>(all.size()), [&](int i) -> double {
    const auto& [kind_index, time, victim] = all[i];
    const Kind& kind = kKinds[kind_index];
    const ScratchFolder folder;
    const auto outcome = disturb(kind, words, folder.path(), time, std::to_string(calibration.soon().count()),
                                 [&, victim = victim](RunningJob& job) { return job.send(victim, SIGKILL); });
    SCOPED_TRACE("rank " + std::to_string(victim) + " killed, " + outcome.text);
    EXPECT_THAT(outcome.leftovers, IsEmpty());
    if (!outcome.came_about) return 0;
    const std::string number = std::to_string(victim), count = std::to_string(kind.processes);
    const std::string gone = "the process of rank " + number + " (cpu) is gone";
    const bool had_finished =
        outcome.of(kind, victim).out.find("process " + number + ": all calls made\n") != std::string::npos;
    auto limit = calibration.soon();
    for (int process = 0; process < kind.processes; ++process) {
      if (process == victim) continue;
      const Finished& other = outcome.of(kind, process);
      const std::string name = "process " + std::to_string(process) + ": ";
      if (had_finished && other.out.find(name + "ok\n") != std::string::npos) continue;
      ++named;
      if (kind.launched) {
        EXPECT_EQ(other.code, 128 + SIGKILL);
        // On a slow machine it may not have begun when the launcher's patience is over.
        const bool is_forced = other.err.find("ending the others") != std::string::npos;
        if (is_forced && calibration.soon() > kSoon && other.err.find(name) == std::string::npos) continue;
        const std::string absent = name + "process " + number + " of " + count;
        EXPECT_THAT(other.err, AnyOf(HasSubstr(name + gone + ": it was ended by signal 9"),
                                     HasSubstr(absent + " is gone: it was ended by signal 9"),
                                     HasSubstr(absent + " did not come to run(): it was ended by signal 9")));
        continue;
      }
      EXPECT_EQ(other.code, 3);
      if (other.err.find(gone) != std::string::npos) continue;
      EXPECT_THAT(other.err, says_that_it_does_not_come(victim));
      limit += kSilentStore;
    }
    return outcome.took / limit;
  });
  EXPECT_GT(named, 30);
}

class StopsAtRandomMoments : public Cli {};

TEST_F(StopsAtRandomMoments, EndAllSoonAndLeaveAWholeRunOrNone) {
  const Words program = {from_environment("LOCKSTEP_PROGRAM")};
  const Words arguments = train({"--devices", "cpu", "--epochs", "6", "--checkpoint-every", "3", "--name", "a"});
  const Words words = program + arguments;
  const Calibration calibration(words, 2000ms);
  const auto all = moments(50, calibration, 17);
  std::atomic<int> stopped{0};
  expect_in_time(static_cast<int>(all.size()), [&](int i) -> double {
    const auto& [kind_index, time, victim] = all[i];
    const Kind& kind = kKinds[kind_index];
    const ScratchFolder folder;
    const auto outcome = disturb(kind, words, folder.path(), time, /*patience=*/"20", [](RunningJob& job) {
      job.send_to_job(SIGTERM);
      return true;
    });
    SCOPED_TRACE("asked to stop, " + outcome.text);
    const double share = outcome.took / calibration.soon();
    EXPECT_THAT(outcome.leftovers, IsEmpty());
    for (const auto& process : outcome.processes) {
      const bool ended_by_it = process.signal == SIGTERM;  // the program had not begun
      if (process.code != 0) ++stopped;
      EXPECT_TRUE(ended_by_it || process.code == 0 || process.code == 128 + SIGTERM) << process.code;
      EXPECT_THAT(process.err, Not(HasSubstr("error")));
      EXPECT_THAT(process.err, Not(HasSubstr("ending the others")));
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
    if (i % 5 > 0) return share;  // one of each kind goes on: of a launcher's on as many ranks, with the same bits
    const Words launcher = kind.launched ? Words{"launch", "-n", std::to_string(kind.processes)} + program : Words{};
    const Finished gone_on = run_program(launcher + arguments + Words{"--resume", "auto"},
                                         {.folder = folder.path(), .environment = surroundings().environment});
    EXPECT_EQ(gone_on.code, 0) << gone_on.err;
    const auto run = std::filesystem::path("runs") / "a";
    EXPECT_THAT(read_metrics(folder / run / "metrics.jsonl"), SizeIs(6)) << gone_on.err;
    if (!kind.launched) return share;
    const auto weights = run / "model.safetensors";
    EXPECT_EQ(difference(folder / weights, calibration.folders[kind_index] / weights), 0);
    return share;
  });
  EXPECT_GT(stopped, 30);
}

}  // namespace random_moments_test
