// Labels: processes long thorough
// Not under sanitizers: *IsGoneWithinASecond
// What goes wrong between processes: every process says who is to blame, soon, and nothing waits for ever.
#include "timed_job.hpp"

#include "comm/meeting/job_store.hpp"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace process_failures_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

TEST(ProcessFailures, ARankThatThrowsIsNamedByAllSoon) {
  at_once<std::pair<int, const char*>>({{2, "cpu"}, {3, "cpu"}, {2, "4xcpu"}}, [&](const auto& job_of) {
    const auto& [processes, devices] = job_of;
    const auto jobs = timed_side_by_side(processes, {{"throws", devices, "allreduce"}, {"throws", devices, "recv"}});
    for (const auto& [job, took] : jobs) {
      EXPECT_EQ(job.code, 3) << job.err;
      EXPECT_THAT(job.err, AllFail(processes, Error::user_code, {1})) << devices;
      EXPECT_LT(took, kBeforeTimeouts);
      EXPECT_THAT(job.err, Not(HasSubstr("ending the others")));
    }
  });
}

TEST(ProcessFailures, AKilledProcessIsNamedByTheOthers) {
  at_once<int>({2, 3}, [](const int processes) {
    const auto [job, took] = timed(processes, {"dies"});
    EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
    EXPECT_THAT(job.err, HasSubstr("lockstep launch: rank 1 was ended by signal 9 (Killed)"));
    std::set<std::string> texts;  // one, so that `lockstep train` says it once
    for (const int survivor : {0, 2}) {
      if (survivor >= processes) continue;
      const std::string name = "process " + std::to_string(survivor) + ": ";
      ASSERT_THAT(job.err, HasSubstr(name));
      texts.insert(job.err.substr(job.err.find(name) + name.size(), 150));
    }
    ASSERT_EQ(texts.size(), 1u) << job.err;
    EXPECT_THAT(*texts.begin(),
                StartsWith("the process of rank 1 (cpu) is gone: it was ended by signal 9 (Killed). rank "));
    EXPECT_THAT(job.err,
                HasSubstr(" (cpu) was in allreduce(sum) of float [2, 3] (collective call 1); the last complete "
                          "one was collective call 0, barrier\n"));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

// Gloo forgets who waits for a tensor that it was writing.
TEST(ProcessFailures, AProcessThatIsKilledWhileItReceivesIsNamedByTheOthersSoon) {
  std::mutex mutex;
  long shortest = 10'000;  // milliseconds that rank 0 waited
  at_once<std::pair<int, const char*>>({{2, "cpu"}, {3, "cpu"}, {2, "4xcpu"}}, [&](const auto& job_of) {
    const auto& [processes, devices] = job_of;
    const auto [job, took] = timed(processes, {"dies_while_it_receives", devices});
    EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
    EXPECT_THAT(
        job.err,
        MatchesRegex("(.|\n)*process 0: the process of ranks? [12].* is gone: it was ended by signal 9 (.|\n)*"))
        << devices;
    EXPECT_THAT(job.err, Not(HasSubstr("ending the others")));
    EXPECT_LT(took, kBeforeTimeouts);
    const std::string before = "rank 0 waited ";
    const size_t found = job.out.find(before);
    ASSERT_NE(found, job.out.npos) << job.out;
    const std::lock_guard lock(mutex);
    shortest = std::min(shortest, std::stol(job.out.substr(found + before.size())));
  });
  if (kSlowdown == 1) EXPECT_LT(shortest, 400);
}

TEST(ProcessFailures, AProcessWhoseRankCallsExitIsNamedByTheOthers) {
  // With two ranks in each process, rank 1 is of process 0.
  at_once<std::pair<const char*, std::string>>({{"cpu", "0"}, {"4xcpu", "1"}}, [](const auto& job_of) {
    const auto& [devices, survivor] = job_of;
    const auto [job, took] = timed(2, {"dies", devices, "exit"});
    // The launcher's code is the first one's that ended: std::exit says why at once, and then takes its time.
    EXPECT_THAT(job.code, AnyOf(7, 3)) << job.err;
    EXPECT_THAT(job.err, HasSubstr("process " + survivor + ": cause user_code rank 1\n"));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(ProcessFailures, ADeathInALoopOfOnesOwnNamesTheLastCompleteStep) {
  const auto [job, took] = timed(2, {"dies_in_a_backward"});
  EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
  EXPECT_THAT(job.err, HasSubstr("; the last complete step was step 2\n"));
  // Warnings of ours come through, though LibTorch's are kept back.
  EXPECT_THAT(
      job.err,
      HasSubstr("lockstep: rank 0 (cpu): DataParallel: no rank used these parameters in the first backward: spare."));
}

// A tensor of more than there is, one that a limit (ulimit -v, as a batch system sets it) refuses, and memory of C++.
TEST(ProcessFailures, ARankThatRunsOutOfMemoryIsNamedByAll) {
  if (kSlowdown > 1) GTEST_SKIP() << "sanitizers take address space without end";
  at_once<const char*>({"tensor", "limit", "vector"}, [](const char* const what) {
    const auto [job, took] = timed(2, {"runs_out_of_memory", "cpu", what});
    EXPECT_EQ(job.code, 3) << job.err;
    EXPECT_THAT(job.err, AllFail(2, Error::machine, {1})) << what;
    EXPECT_THAT(job.err, HasSubstr("Less is needed with a smaller batch"));
    if (what != std::string("vector")) EXPECT_THAT(job.err, ContainsRegex("tried to allocate [0-9]+ bytes"));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(ProcessFailures, AKilledServerOrWorkerOfAParameterServerIsNamedByTheOthers) {
  at_once<int>({1, 2}, [](const int victim) {
    const auto [job, took] = timed(3, {"serves", "cpu", std::to_string(victim)});
    EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
    for (const int survivor : {0, 1, 2}) {
      if (survivor == victim) continue;
      EXPECT_THAT(job.err, FailsIn(survivor, Error::death, {victim}));
    }
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(ProcessFailures, ATimeoutSaysWhoWasMissingAndWhere) {
  const auto [job, took] = timed(2, {"reads_on"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, AllFail(2, Error::late));
  EXPECT_THAT(job.err, HasSubstr("rank 1 (cpu) has been in Samples::read (batch 0) for "));
}

TEST(ProcessFailures, ARankThatReturnsWithoutTheOthersCallIsNamed) {
  at_once<const char*>({"cpu", "4xcpu"}, [](const char* const devices) {
    const auto [job, took] = timed(2, {"returns_early", devices});
    EXPECT_EQ(job.code, 3);
    EXPECT_THAT(job.err, AllFail(2, Error::difference, {1}));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(ProcessFailures, PollingEndsAsWaitingDoes) {
  at_once<const char*>({"cpu", "4xcpu"}, [](const char* const devices) {
    const auto [job, took] = timed(2, {"returns_early", devices, "poll"});
    EXPECT_EQ(job.code, 3);
    EXPECT_THAT(job.err, AllFail(2, Error::difference, {1}));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(ProcessFailures, ACallThatNobodyAnswersIsAnErrorOfAll) {
  at_once<std::pair<int, const char*>>({{2, "cpu"}, {3, "cpu"}, {2, "4xcpu"}}, [&](const auto& job_of) {
    const auto& [processes, devices] = job_of;
    const auto jobs = timed_side_by_side(processes, {{"asks_in_vain", devices}, {"asks_in_vain", devices, "send"}});
    const auto& [job, took] = jobs[0];
    const auto& [message, took_too] = jobs[1];
    EXPECT_THAT(job.err, AllFail(processes, Error::difference));
    EXPECT_THAT(message.err, AllFail(processes, Error::difference));
    EXPECT_LT(std::max(took, took_too), kBeforeTimeouts);
  });
}

TEST(ProcessFailures, WhatAStrangerWritesIntoTheStoreIsShown) {
  const Words keys = {"state/0", "beat/0", "done"};
  std::vector<Words> jobs;
  for (const auto& key : keys) jobs.push_back({"has_a_stranger", "cpu", key});
  const auto results = timed_side_by_side(2, jobs);
  for (size_t i = 0; i < keys.size(); ++i) {
    const Finished& job = results[i].job;
    EXPECT_EQ(job.code, 3) << job.err;
    EXPECT_THAT(job.err, FailsIn(0, Error::machine));
  }
}

// Two processes without a launcher, of which one waits for the other.
struct TwoProcesses {
  Finished waiting;
  std::chrono::steady_clock::duration took;  // until that had ended
  Finished other;
};

// How long rank 0 lives on once rank 1 was killed.
std::chrono::steady_clock::duration outlives_a_death() {
  const std::string port = free_port();
  Program survivor = start_rank(0, port, {"dies"});
  Program victim = start_rank(1, port, {"dies"});
  EXPECT_EQ(victim.finish().signal, SIGKILL);
  const auto death = std::chrono::steady_clock::now();
  EXPECT_THAT(survivor.finish().err, FailsIn(0, Error::death, {1}));
  return std::chrono::steady_clock::now() - death;
}

// Asks both processes of a job to stop once rank 1 lets rank 0 wait. A launcher would end both itself.
TwoProcesses stop_while(const std::string& rank_1) {
  const std::string port = free_port();
  Program first = start_rank(0, port, {"is_asked_to_stop", "cpu", rank_1});
  Program second = start_rank(1, port, {"is_asked_to_stop", "cpu", rank_1});
  EXPECT_TRUE(second.wait_for("ready"));
  const auto begin = std::chrono::steady_clock::now();
  first.send(SIGTERM);
  second.send(SIGTERM);
  TwoProcesses stopped{first.finish(), std::chrono::steady_clock::now() - begin, {}};
  if (rank_1 == "freezes") second.send(SIGKILL);
  stopped.other = second.finish();
  return stopped;
}

TwoProcesses with_a_store_that_freezes() {
  const std::string port = free_port();
  Program host = start_rank(0, port, {"freezes"});
  const auto begin = std::chrono::steady_clock::now();
  TwoProcesses ended{start_rank(1, port, {"freezes"}).finish(), std::chrono::steady_clock::now() - begin, {}};
  host.send(SIGKILL);
  ended.other = host.finish();
  return ended;
}

TwoProcesses with_a_store_that_is_frozen_from_the_start() {
  const std::string port = free_port();
  Program host = start_rank(0, port, {"collectives"});
  const auto listens = [&] {
    return comm::answers("127.0.0.1", std::stoi(port), std::chrono::steady_clock::now() + 1s);
  };
  while (!listens()) std::this_thread::sleep_for(10ms);
  host.send(SIGSTOP);  // the system accepts connections for it
  const auto begin = std::chrono::steady_clock::now();
  TwoProcesses ended{start_rank(1, port, {"collectives"}).finish(), std::chrono::steady_clock::now() - begin, {}};
  host.send(SIGKILL);
  ended.other = host.finish();
  return ended;
}

// Rank 1 stands still until rank 0 has ended without it.
TwoProcesses woken_too_late() {
  const std::string port = free_port();
  const Words lives = {"lives", "cpu", "for_ever"};
  Program first = start_rank(0, port, lives), second = start_rank(1, port, lives);
  EXPECT_TRUE(first.wait_for("connected"));
  EXPECT_TRUE(second.wait_for("connected"));
  second.send(SIGSTOP);
  TwoProcesses ended{first.finish(), {}, {}};
  second.send(SIGCONT);
  const auto begin = std::chrono::steady_clock::now();
  ended.other = second.finish();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kBeforeTimeouts);
  return ended;
}

// The pause is that of Ctrl-Z in several terminals, or of a machine that slept: the process that goes on first finds
// the others silent.
std::vector<Finished> with_a_pause() {
  const ScratchFolder folder;
  RunningJob job(2, /*launched=*/false, {ranks_program(), "sleeps"}, folder.path());
  EXPECT_TRUE(job.wait_for("ready"));
  std::this_thread::sleep_for(1500ms);  // rank 0 looks after the others by now
  job.send_to_job(SIGSTOP);
  std::this_thread::sleep_for(3500ms);  // longer than the silence that is allowed, and with the rest than the timeout
  job.send(0, SIGCONT);
  std::this_thread::sleep_for(500ms);
  job.send(1, SIGCONT);
  return job.finish();
}

// Rank 0's process keeps the store, and the dead one says no farewell. The best of three: a machine may be busy.
TEST(ProcessFailures, WithoutALauncherTooADeathEndsTheOthersWithinTwoSeconds) {
  auto best = outlives_a_death();
  for (int i = 1; i < 3 && best >= 2s; ++i) best = std::min(best, outlives_a_death());
  EXPECT_LT(best, kSlowdown * 2s);
}

// A job ends without a word by the loss of its launcher, of rank 0 under a launcher, or of rank 0 that keeps the store.
enum class Loss { launcher, rank_0, store_host };

std::chrono::steady_clock::duration end_after(Loss loss) {
  const ScratchFolder folder;
  RunningJob job(3, /*launched=*/loss != Loss::store_host, {ranks_program(), "lives", "cpu", "for_ever"},
                 folder.path());
  job.wait_for_processes();
  EXPECT_TRUE(job.wait_for("connected"));
  std::this_thread::sleep_for(200ms);
  const auto start = std::chrono::steady_clock::now();
  if (loss == Loss::launcher) {
    job.send_to_job(SIGKILL);
  } else {
    job.send(0, SIGKILL);
  }
  job.finish();  // reads until nobody has the outputs open
  const auto took = std::chrono::steady_clock::now() - start;
  // The launcher's watchers end once the system has taken what is left of the dead: their parent is gone.
  while (!job.leftovers().empty() && std::chrono::steady_clock::now() - start < kBeforeTimeouts)
    std::this_thread::sleep_for(20ms);
  EXPECT_THAT(job.leftovers(), testing::IsEmpty());
  return took;
}

// The best of three: a machine may be busy.
TEST(ProcessFailures, WithoutItsLauncherRank0OrTheStoreAJobIsGoneWithinASecond) {
  for (const Loss loss : {Loss::launcher, Loss::rank_0, Loss::store_host}) {
    auto best = std::chrono::steady_clock::duration::max();
    for (int i = 0; i < 3 && best >= 1s; ++i) best = std::min(best, end_after(loss));
    EXPECT_LT(best, kSlowdown * 1s) << static_cast<int>(loss);
  }
}

template <class Work>
auto in_background(const Work& work) {
  return std::async(kAtOnce, work);
}

// These jobs spend seconds on nothing but waiting, so they run at the same time.
class ProcessFailuresInTime : public testing::Test {
 protected:
  struct Jobs {
    std::future<TwoProcesses> stopped_asleep = in_background([] { return stop_while("sleeps"); });
    std::future<TwoProcesses> stopped_frozen = in_background([] { return stop_while("freezes"); });
    std::future<TwoProcesses> stopped_computing = in_background([] { return stop_while("computes"); });
    std::future<TwoProcesses> frozen_store = in_background(with_a_store_that_freezes);
    std::future<TwoProcesses> store_frozen_from_start = in_background(with_a_store_that_is_frozen_from_the_start);
    std::future<TimedJob> frozen = in_background([] { return timed(3, {"freezes"}); });
    std::future<std::vector<Finished>> paused = in_background(with_a_pause);
    std::future<TwoProcesses> woken = in_background(woken_too_late);
  };
  static void SetUpTestSuite() { jobs_ = std::make_unique<Jobs>(); }
  static void TearDownTestSuite() { jobs_.reset(); }
  static inline std::unique_ptr<Jobs> jobs_;
};

TEST_F(ProcessFailuresInTime, AStopEndsAWaitInWhichNothingHappens) {
  for (auto* const job : {&jobs_->stopped_asleep, &jobs_->stopped_frozen}) {
    const auto stopped = job->get();
    EXPECT_EQ(stopped.waiting.code, 3);
    EXPECT_THAT(stopped.waiting.err, FailsIn(0, Error::stopped));
    EXPECT_THAT(stopped.waiting.out, HasSubstr("stopped\n"));
    EXPECT_LT(stopped.took, kSlowdown * 6s);  // one and a half seconds, and what a loaded machine needs
    if (stopped.other.code == 3)
      EXPECT_THAT(stopped.other.out, HasSubstr("stopped\n"));  // the store told the process so
  }
}

TEST_F(ProcessFailuresInTime, AStopWaitsForARankThatComputes) {
  const auto stopped = jobs_->stopped_computing.get();
  EXPECT_EQ(stopped.waiting.code, 0) << stopped.waiting.err;
  EXPECT_EQ(stopped.other.code, 0) << stopped.other.err;
}

TEST_F(ProcessFailuresInTime, AJobThatStoodStillGoesOn) {
  for (const auto& process : jobs_->paused.get()) EXPECT_EQ(process.code, 0) << process.err;
}

TEST_F(ProcessFailuresInTime, AFrozenProcessIsNamedByTheOthers) {
  const auto [job, took] = jobs_->frozen.get();
  for (const int process : {1, 2}) {
    EXPECT_THAT(job.err, FailsIn(process, Error::death, {0}));
  }
  EXPECT_LT(took, kSlowdown * 60s);
}

TEST_F(ProcessFailuresInTime, OneThatWakesWhenTheOthersHaveEndedSaysSo) {
  const auto ended = jobs_->woken.get();
  EXPECT_EQ(ended.waiting.code, 3);
  EXPECT_THAT(ended.waiting.err, FailsIn(0, Error::death, {1}));
  EXPECT_EQ(ended.other.code, 3);
  EXPECT_THAT(ended.other.err, FailsIn(1, Error::death));
}

TEST_F(ProcessFailuresInTime, AStoreThatFreezesEndsTheRun) {
  const auto ended = jobs_->frozen_store.get();
  EXPECT_LT(ended.took, kSlowdown * 40s);
  EXPECT_EQ(ended.waiting.code, 3);
  EXPECT_THAT(ended.waiting.err, HasSubstr("process 1: the process of rank 0 (cpu) is gone: the store that it keeps "
                                           "does not answer. rank 1 (cpu) was in "));
  EXPECT_EQ(ended.other.signal, SIGKILL);
}

TEST_F(ProcessFailuresInTime, AStoreThatIsFrozenFromTheStartEndsTheRun) {
  const auto ended = jobs_->store_frozen_from_start.get();
  EXPECT_LT(ended.took, kSlowdown * 40s);
  EXPECT_EQ(ended.waiting.code, 3);
  EXPECT_THAT(ended.waiting.err, HasSubstr("process 1 of 2 cannot use the store at 127.0.0.1:"));
  EXPECT_EQ(ended.other.signal, SIGKILL);
}

}  // namespace process_failures_test
