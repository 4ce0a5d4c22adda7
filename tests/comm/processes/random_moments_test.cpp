// Labels: processes program
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
using Seconds = std::chrono::duration<double>;

constexpr Seconds kSoon = 2s;  // to the last process's end, on a machine that has nothing else to do

struct Kind {
  int processes;
  bool launched;
};
const std::vector<Kind> kKinds = {{2, true}, {3, true}, {2, false}, {3, false}};

std::string name_of(const Kind& kind) {
  return std::to_string(kind.processes) + " processes " + (kind.launched ? "of a launcher" : "without a launcher");
}

// How long undisturbed jobs take, by kind, side by side as the disturbed ones.
struct Calibration {
  std::vector<Seconds> times = std::vector<Seconds>(kKinds.size());

  Calibration(const Words& words, const Seconds& usual) : usual_(usual) {
    side_by_side(static_cast<int>(kKinds.size()), [&](int kind) {
      const ScratchFolder folder;
      RunningJob job(kKinds[kind].processes, kKinds[kind].launched, words, folder.path());
      job.wait_for_processes();
      const auto start = Clock::now();
      for (const auto& process : job.finish()) EXPECT_EQ(process.code, 0) << process.err;
      times[kind] = Clock::now() - start;
    });
  }

  // On a machine that takes longer than is usual for a job, longer too.
  Seconds soon() const { return kSoon * std::max(1.0, *std::max_element(times.begin(), times.end()) / usual_); }

 private:
  const Seconds usual_;
};

// The machine may stand still for a moment, so a few jobs may be late; none by a timeout of ours.
class Lateness {
 public:
  void count(const Seconds& took, const Seconds& limit) {
    if (took >= limit) ++late_;
    EXPECT_LT(took, 4 * limit);
  }
  int late() const { return late_; }

 private:
  std::atomic<int> late_{0};
};

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

TEST(RandomMoments, AKilledProcessIsNamedByAllOthersSoonAndNothingIsLeft) {
  const Words words = {ranks_program(), "lives"};
  const Calibration calibration(words, 1500ms);
  const auto all = moments(50, calibration, 16);
  std::atomic<int> named{0};
  Lateness lateness;
  side_by_side(static_cast<int>(all.size()), [&](int i) {
    const auto& [kind_index, time, victim] = all[i];
    const Kind& kind = kKinds[kind_index];
    const ScratchFolder folder;
    const auto outcome = disturb(kind, words, folder.path(), time, std::to_string(calibration.soon().count()),
                                 [&, victim = victim](RunningJob& job) { return job.send(victim, SIGKILL); });
    SCOPED_TRACE("rank " + std::to_string(victim) + " killed, " + outcome.text);
    EXPECT_THAT(outcome.leftovers, IsEmpty());
    if (!outcome.came_about) return;
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
      // Without a launcher a process that dies before the meeting is one that does not come, and rank 0's takes the
      // store along.
      EXPECT_THAT(other.err, AnyOf(HasSubstr("which did not come to run()"), HasSubstr("the process of rank 0 is gone"),
                                   HasSubstr("for the store that rank 0's process should keep"),
                                   HasSubstr("cannot use the store at"),
                                   HasSubstr("for rank " + number + " (cpu), which is not there")));
      limit += 10s;  // that long a store may keep silent
    }
    lateness.count(outcome.took, limit);
  });
  EXPECT_GT(named, 30);
  EXPECT_LE(lateness.late(), 5);
}

class StopsAtRandomMoments : public Cli {};

TEST_F(StopsAtRandomMoments, EndAllSoonAndLeaveAWholeRunOrNone) {
  const Words words = Words{from_environment("LOCKSTEP_PROGRAM")} +
                      train({"--devices", "cpu", "--epochs", "6", "--checkpoint-every", "3", "--name", "a"});
  const Calibration calibration(words, 3000ms);
  const auto all = moments(16, calibration, 17);
  std::atomic<int> stopped{0};
  Lateness lateness;
  side_by_side(static_cast<int>(all.size()), [&](int i) {
    const auto& [kind_index, time, victim] = all[i];
    const Kind& kind = kKinds[kind_index];
    const ScratchFolder folder;
    const auto outcome = disturb(kind, words, folder.path(), time, /*patience=*/"20", [](RunningJob& job) {
      job.send_to_job(SIGTERM);
      return true;
    });
    SCOPED_TRACE("asked to stop, " + outcome.text);
    lateness.count(outcome.took, calibration.soon());
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
    if (i % 5 > 0) return;  // one of each kind goes on
    const Finished gone_on = run_program(
        train({"--devices", "cpu", "--epochs", "6", "--checkpoint-every", "3", "--name", "a", "--resume", "auto"}),
        {.folder = folder.path(), .environment = surroundings().environment});
    EXPECT_EQ(gone_on.code, 0) << gone_on.err;
    EXPECT_THAT(read_metrics(folder.path() / "runs" / "a" / "metrics.jsonl"), SizeIs(6)) << gone_on.err;
  });
  EXPECT_GT(stopped, 8);
  EXPECT_LE(lateness.late(), 2);
}

}  // namespace random_moments_test
