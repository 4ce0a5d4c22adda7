// Labels: processes long thorough
// lockstep launch: the environment that it makes, exit codes, signals, messages.
#include "memory_group.hpp"
#include "running_job.hpp"

#include <fstream>
#include <tuple>

namespace launch_test {

using namespace lockstep;
using testing::AllOf;
using testing::ContainsRegex;
using testing::EndsWith;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

Finished launch_shell(int processes, const std::string& script, const Words& flags = {}, const Words& variables = {}) {
  return run_program(Words{"launch", "-n", std::to_string(processes)} + flags + Words{"sh", "-c", script},
                     surroundings_with(variables));
}

TEST(Launch, SetsTorchrunsVariables) {
  const auto job =
      launch_shell(3,
                   "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $TORCHELASTIC_USE_AGENT_STORE; "
                   "test $MASTER_PORT -gt 1023");
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(job.err, "");
  for (const char* line : {"0 0 3 3 127.0.0.1 True\n", "1 1 3 3 127.0.0.1 True\n", "2 2 3 3 127.0.0.1 True\n"}) {
    EXPECT_THAT(job.out, HasSubstr(line));
  }
}

TEST(Launch, HandsArgumentsOnAsTheyAre) {
  const auto job =
      run_program({"launch", "-n", "1", "echo", "-n", "--help", "a  b", "--threads", "3"}, surroundings_with());
  EXPECT_EQ(job.out, "--help a  b --threads 3");
}

TEST(Launch, SetsThreads) {
  const auto threads = [](const Words& flags, const Words& variables) {
    return launch_shell(2, "test $RANK = 1 || echo $OMP_NUM_THREADS", flags, variables).out;
  };
  EXPECT_EQ(threads({}, {}), "1\n");
  EXPECT_EQ(threads({"--threads", "3"}, {}), "3\n");
}

TEST(Launch, LabelsLinesIfAsked) {
  const auto job = launch_shell(2, "echo out $RANK; echo err $RANK >&2; printf end", {"--label"});
  for (const char* line : {"[0] out 0\n", "[1] out 1\n", "[0] err 0\n", "[1] err 1\n", "[0] end\n", "[1] end\n"}) {
    EXPECT_THAT(job.out, HasSubstr(line));
  }
}

TEST(Launch, ReturnsTheFirstFailuresCodeAndEndsTheOthers) {
  const auto start = std::chrono::steady_clock::now();
  const auto job = launch_shell(3, "test $RANK != 1 || exit 7; exec sleep 100");
  EXPECT_EQ(job.code, 7);
  EXPECT_THAT(job.err, AllOf(ContainsRegex("^lockstep launch: rank 1 ended with exit code 7 after [0-9.]+ s\n"),
                             HasSubstr("lockstep launch: ending the others\n"), Not(HasSubstr("rank 0")),
                             Not(HasSubstr("rank 2")),
                             EndsWith("lockstep launch: the job failed: rank 1 ended with exit code 7\n")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Launch, TheLastLineNamesTheFirstOfSeveralThatFailAndNoneThatWasAlone) {
  const auto both = launch_shell(2, "test $RANK != 1 || exit 7; trap 'exit 8' TERM; while :; do sleep 0.1; done");
  EXPECT_EQ(both.code, 7);
  EXPECT_THAT(both.err, EndsWith("lockstep launch: the job failed: rank 1 ended with exit code 7\n"));
  const auto alone = launch_shell(1, "exit 7");
  EXPECT_EQ(alone.code, 7);
  EXPECT_THAT(alone.err, AllOf(HasSubstr("exit code 7"), Not(HasSubstr("the job failed"))));
}

TEST(Launch, AProcessThatDoesNotComeToItsRunIsToldToThoseThatWait) {
  for (const auto& [what, how, code] : {std::tuple("exit 9", "it ended with exit code 9", 9),
                                        std::tuple("kill -9 $$", "it was ended by signal 9 (Killed)", 128 + 9),
                                        std::tuple("exit 0", "it ended with exit code 0", 3)}) {
    const auto start = std::chrono::steady_clock::now();
    const auto job = run_program(with_rank_1_doing(what, {ranks_program(), "collectives"}), surroundings_with());
    EXPECT_EQ(job.code, code) << job.err;
    EXPECT_THAT(job.err, AllOf(HasSubstr(std::string("process 0: process 1 of 2 did not come to run(): ") + how + "\n"),
                               Not(HasSubstr("ending the others"))));
    EXPECT_LT(std::chrono::steady_clock::now() - start, kBeforeTimeouts);  // the rendezvous waits for 60
  }
}

TEST(Launch, AProcessThatIsKilledInItsRunIsToldToTheOthers) {
  const auto job = run_launched(2, {"dies"});
  EXPECT_EQ(job.code, 128 + SIGKILL);
  EXPECT_THAT(
      job.err,
      HasSubstr(
          "process 0: the process of rank 1 (cpu) is gone: it was ended by signal 9 (Killed). rank 0 (cpu) was in "));
}

// The group is like a container with a memory limit. tail keeps a line in memory, and /dev/zero has no end of one.
TEST(Launch, AProcessThatTheKernelKillsForWantOfMemoryIsToldSo) {
  const MemoryGroup group(1 << 30);
  if (!group.is_there()) GTEST_SKIP() << "this system lets the test make no control group";
  const auto job =
      run_program(group.lockstep(with_rank_1_doing("exec tail /dev/zero", {ranks_program(), "collectives"})),
                  group.with(surroundings_with()));
  EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
  const std::string why =
      ", probably by the kernel for want of memory, the machine's or a container's (less is needed with a smaller "
      "batch";
  EXPECT_THAT(job.err,
              AllOf(ContainsRegex("lockstep launch: rank 1 was ended by signal 9 .Killed. after [0-9.]+ s, pro"),
                    HasSubstr("did not come to run(): it was ended by signal 9 (Killed)" + why)));
}

// Some shells and container runtimes start programs so. The system then forgets how a child ended.
TEST(Launch, EndsThoughSigchldIsIgnoredAndItsProcessesIgnoreIt) {
  const auto launch = [](const Words& words) {
    auto around = surroundings_with();
    around.program = find_program("bash");  // dash handles SIGCHLD itself
    return run_program(
        Words{"-c", "trap '' CHLD; exec \"$0\" launch \"$@\"", from_environment("LOCKSTEP_PROGRAM")} + words, around);
  };
  const auto ends = launch({"-n", "2", "grep", "SigIgn", "/proc/self/status"});
  EXPECT_EQ(ends.code, 0) << ends.err;
  EXPECT_THAT(ends.out, MatchesRegex("(SigIgn:\t[0-9a-f]+1[0-9a-f]{4}\n){2}"));  // its bit is 1 << 16
  EXPECT_EQ(launch({"-n", "2", "sh", "-c", "exit 7"}).code, 7);
  EXPECT_EQ(launch({"--elastic", "-n", "1", "true"}).code, 0);
}

TEST(Launch, TooFewFileDescriptorsAreNamed) {
  const auto job = run_program(
      {"launch", "-n", "2", "sh", "-c", "ulimit -n 10; exec \"$0\" collectives", ranks_program()}, surroundings_with());
  EXPECT_EQ(job.code, 3) << job.err;
  EXPECT_THAT(job.err,
              AllOf(HasSubstr("(cpu): connecting to the other ranks failed: "), HasSubstr("Too many open files")));
}

// With some of these limits the launcher starts processes, and then cannot take their connections.
TEST(Launch, ALauncherWithTooFewFileDescriptorsCallsNobodyAStranger) {
  auto around = surroundings_with();
  around.program = "/bin/sh";
  int failed = 0;
  for (int limit = 16; limit <= 20; ++limit) {
    const auto job = run_program({"-c", "ulimit -n " + std::to_string(limit) + "; exec \"$0\" launch -n 4 \"$@\"",
                                  from_environment("LOCKSTEP_PROGRAM"), ranks_program(), "collectives"},
                                 around);
    EXPECT_THAT(job.err, Not(HasSubstr("stranger"))) << limit;
    if (job.code == 0) continue;
    ++failed;
    EXPECT_THAT(job.err, HasSubstr("Too many open files")) << limit;
  }
  EXPECT_GT(failed, 0);
}

TEST(Launch, StartsAFailedJobAgain) {
  const auto with = [](const char* restarts) {
    return launch_shell(2,
                        "echo $RANK.$TORCHELASTIC_RESTART_COUNT; test $RANK.$TORCHELASTIC_RESTART_COUNT != 1.0 || "
                        "kill -9 $$; exec sleep 0.$TORCHELASTIC_RESTART_COUNT",
                        {"--max-restarts", restarts});
  };
  const auto never = with("0"), once = with("1");
  EXPECT_EQ(never.code, 128 + SIGKILL);
  EXPECT_THAT(never.err, Not(HasSubstr("restart")));
  EXPECT_EQ(once.code, 0);
  EXPECT_THAT(once.err, MatchesRegex("lockstep launch: rank 1 was ended by signal 9 .Killed. after [0-9.]+ s\n"
                                     "lockstep launch: all processes start again, restart 1 of 1\n"));
  for (const char* line : {"0.0\n", "1.0\n", "0.1\n", "1.1\n"}) EXPECT_THAT(once.out, HasSubstr(line));
}

TEST(Launch, AJobThatFailsEachTimeFails) {
  const auto job = launch_shell(1, "exit 7", {"--max-restarts", "2"});
  EXPECT_EQ(job.code, 7);
  EXPECT_THAT(job.err, AllOf(HasSubstr("restart 1 of 2\n"), HasSubstr("restart 2 of 2\n"), Not(HasSubstr("3 of 2"))));
}

// In a new attempt nothing counts that the ranks of the one before have left in the store.
TEST(Launch, TheRanksOfANewAttemptMeetAnew) {
  const auto job = run_program(Words{"launch", "-n", "2", "--max-restarts", "1", "sh", "-c",
                                     "set -- \"$0\" dies; test $TORCHELASTIC_RESTART_COUNT = 0 || set -- \"$1\" "
                                     "collectives; exec \"$@\"",
                                     ranks_program()},
                               surroundings_with());
  expect_all_ok(job, 2);
}

TEST(Launch, WhoeverAsksAJobToEndDoesNotWantItAgain) {
  Program program({"launch", "-n", "2", "--max-restarts", "9", "sh", "-c", "echo ready; exec sleep 100"},
                  surroundings_with());
  ASSERT_TRUE(program.wait_for("ready\nready\n"));
  program.send(SIGTERM);
  EXPECT_EQ(program.finish().code, 128 + SIGTERM);
}

TEST(Launch, TellsWhatWasStoppedFromWhatCrashed) {
  const auto job = launch_shell(2, "test $RANK != 1 || kill -STOP $$; exit 7");
  EXPECT_EQ(job.code, 7);
  EXPECT_THAT(job.err, AllOf(HasSubstr("lockstep launch: rank 1 did not crash: a signal or a debugger has stopped it\n"
                                       "lockstep launch: ending the others\n"),
                             Not(HasSubstr("rank 0 did not crash"))));
}

TEST(Launch, KillsWhatDoesNotEnd) {
  const auto job = launch_shell(2, "test $RANK != 1 || exit 7; trap '' TERM; while :; do sleep 0.1; done");
  EXPECT_EQ(job.code, 7);
  EXPECT_THAT(job.err, HasSubstr("rank 0 did not end, so it was killed"));
}

// Nobody else may get the number of a group that will be signalled.
TEST(Launch, KeepsTheNumberOfAProcessThatHasEnded) {
  const lockstep::ScratchFolder folder;
  const std::string file = (folder.path() / "pid").string();
  const auto job =
      launch_shell(2, "if test $RANK = 0; then echo $$ >'" + file + "'; exit 0; fi; until test -s '" + file +
                          "'; do sleep 0.02; done; sleep 0.5; cut -d' ' -f3 /proc/$(cat '" + file + "')/stat");
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(job.out, "Z\n");
}

TEST(Launch, EndsWhatItsProcessesLeftBehind) {
  const auto start = std::chrono::steady_clock::now();
  const auto job = launch_shell(2, "sleep 200 & (trap '' TERM; sleep 200) & echo done");
  EXPECT_EQ(job.code, 0);
  EXPECT_EQ(job.out, "done\ndone\n");  // read to the end: until nobody has the output open any more
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

TEST(Launch, LetsWhatReadsTheOutputOfAProcessFinish) {
  const auto job = launch_shell(1, "echo last | (sleep 0.05; cat) & exit 0");
  EXPECT_EQ(job.out, "last\n");
}

TEST(Launch, LabelsDoNotWaitForAProcessThatLeftItsGroup) {
  const auto start = std::chrono::steady_clock::now();
  const auto job = launch_shell(2, "setsid sleep 20 & echo done", {"--label"});
  EXPECT_EQ(job.code, 0);
  EXPECT_THAT(job.out, AllOf(HasSubstr("[0] done\n"), HasSubstr("[1] done\n")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

TEST(Launch, PassesSignalsOn) {
  for (const auto& [signal, name] : {std::pair(SIGINT, "INT"), std::pair(SIGTERM, "TERM"), std::pair(SIGHUP, "HUP")}) {
    Program program({"launch", "-n", "2", "sh", "-c",
                     std::string("trap 'echo got it; exit 5' ") + name + "; echo ready; while :; do sleep 0.1; done"},
                    surroundings_with());
    ASSERT_TRUE(program.wait_for("ready\nready\n"));
    program.send(signal);
    const auto job = program.finish();
    EXPECT_EQ(job.code, 5);
    EXPECT_EQ(job.out, "ready\nready\ngot it\ngot it\n");
  }
}

TEST(Launch, GivesProcessesThatAreAskedToEndTimeToDoSo) {
  side_by_side(2, [](int i) {
    const char* const grace = i == 0 ? "1" : "10";
    Program program({"launch", "-n", "1", "--grace", grace, "sh", "-c",
                     "trap 'sleep 3; exit 143' TERM; echo ready; while :; do sleep 0.1; done"},
                    surroundings_with());
    ASSERT_TRUE(program.wait_for("ready\n"));
    program.send(SIGTERM);
    const auto job = program.finish();
    EXPECT_EQ(job.code, 128 + SIGTERM);
    const bool is_ended = job.err.find("ending the others") != std::string::npos;
    EXPECT_EQ(is_ended, i == 0) << grace << job.err;
  });
}

TEST(Launch, StandsStillWithItsProcessesAndGoesOn) {
  const ScratchFolder folder;
  auto surroundings = surroundings_with();
  surroundings.folder = folder.path();
  // Without starting programs: a shell whose child is stopped before its exec waits in another state.
  Program program(
      {"launch", "-n", "2", "sh", "-c", "echo $$ >$RANK; echo ready; until test -e go; do :; done; echo went"},
      surroundings);
  ASSERT_TRUE(program.wait_for("ready\nready\n"));
  program.send(SIGTSTP);
  for (const pid_t pid : {program.pid(), pid_in(folder / "0"), pid_in(folder / "1")}) {
    EXPECT_TRUE(wait_for_state(pid, 'T'));
  }
  folder.write("go", "");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (const char* rank : {"0", "1"}) EXPECT_EQ(state_of(pid_in(folder / rank)), 'T');
  program.send(SIGCONT);
  const auto job = program.finish();
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(job.out, "ready\nready\nwent\nwent\n");
}

TEST(Launch, TakesItsProcessesAlongWhenItIsKilled) {
  Program program({"launch", "-n", "2", "sh", "-c", "echo ready; while sleep 0.1; do echo $$; done"},
                  surroundings_with());
  ASSERT_TRUE(program.wait_for("ready\nready\n"));
  program.send(SIGKILL);
  EXPECT_EQ(program.finish().signal, SIGKILL);  // it reads to the end: until the last process has closed its output
}

TEST(Launch, TakesWhatItsProcessesStartedAlongWhenItIsKilled) {
  Program program({"launch", "-n", "2", "--grace", "2", "sh", "-c",
                   "test $RANK = 0 || trap '' TERM; echo ready; sleep 30; sleep 30"},
                  surroundings_with());
  ASSERT_TRUE(program.wait_for("ready\nready\n"));
  program.send(SIGKILL);
  const auto start = std::chrono::steady_clock::now();
  program.finish();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
}

// A terminal or a pipe that is full. What a launcher says must not hold up what it does.
TEST(Launch, SaysWhatItSaysWithoutWaitingForWhoReads) {
  auto narrow = surroundings_with();
  narrow.full_output = 2;
  Program program({"launch", "-n", "1", "--max-restarts", "3", "sh", "-c", "exit 3"}, narrow);
  EXPECT_TRUE(wait_for_state(program.pid(), 'Z'));
  EXPECT_EQ(program.finish().code, 3);
}

TEST(Launch, EndsOnRequestThoughNobodyReadsItsLabelledLines) {
  for (const int code : {0, 7}) {
    const ScratchFolder folder;
    auto narrow = surroundings_with();
    narrow.pipe_bytes = 4096;
    narrow.folder = folder.path();
    Program program(
        {"launch", "-n", "1", "--label", "sh", "-c", "yes | head -c 30000; touch done; exit " + std::to_string(code)},
        narrow);
    while (!std::filesystem::exists(folder / "done")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::this_thread::sleep_for(std::chrono::seconds(1));  // until the launcher has seen the end
    EXPECT_NE(state_of(program.pid()), 'Z') << "it waits for who reads";
    program.send(SIGINT);
    EXPECT_TRUE(wait_for_state(program.pid(), 'Z'));
    EXPECT_EQ(program.finish().code, code == 0 ? 128 + SIGINT : code);
  }
}

TEST(Launch, RefusesWrongUsage) {
  for (const Words& words : {Words{"launch", "sh"}, Words{"launch", "-n", "0", "sh"}, Words{"launch", "-n", "2"},
                             Words{"launch", "-n", "2", "--bogus", "sh"}}) {
    EXPECT_EQ(run_program(words, surroundings_with()).code, 2);
  }
  const auto missing = run_program({"launch", "-n", "2", "/no/such/program"}, surroundings_with());
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.err, HasSubstr("cannot start /no/such/program: No such file or directory\n"));
  auto here = surroundings_with();
  here.folder = std::filesystem::path(ranks_program()).parent_path();
  EXPECT_THAT(run_program({"launch", "-n", "2", "process_ranks"}, here).err,
              HasSubstr("in the folders of PATH; did you mean ./process_ranks?"));
}

TEST(Launch, SaysWhatIsWrongWithTheNumberOfProcesses) {
  for (const char* program : {"ls", "2"}) {
    const auto job = run_program({"launch", "-n", "0", program, "-n"}, surroundings_with());
    EXPECT_EQ(job.code, 2);
    EXPECT_THAT(job.err, StartsWith("lockstep: --processes: 0 is too small; it must be at least 1\n"));
  }
}

// Nothing that the program opens may get the number of one.
TEST(Launch, AClosedStandardDescriptorIsNothingToReadOrWrite) {
  auto surroundings = surroundings_with();
  surroundings.program = "/bin/sh";
  for (const auto& [closed, number] : {std::pair("<&-", "0"), std::pair(">&-", "1"), std::pair("2>&-", "2")}) {
    const auto job =
        run_program({"-c", std::string("exec \"$0\" \"$@\" ") + closed, from_environment("LOCKSTEP_PROGRAM"), "launch",
                     "-n", "1", "sh", "-c", std::string("test \"$(readlink /proc/$$/fd/") + number + ")\" = /dev/null"},
                    surroundings);
    EXPECT_EQ(job.code, 0) << closed << job.err;
  }
}

// Processes end so without labels too. Else nobody would learn that they go on.
TEST(Launch, WithLabelsTooAReaderThatGoesAwayEndsThem) {
  Program program({"launch", "-n", "2", "--label", "sh", "-c", "while echo line; do sleep 0.1; done"},
                  surroundings_with());
  ASSERT_TRUE(program.wait_for("[1] line\n"));
  program.close_output();
  const auto job = program.finish();
  EXPECT_EQ(job.code, 128 + SIGPIPE) << job.err;
  EXPECT_THAT(job.err, HasSubstr("was ended by signal 13"));
}

TEST(Launch, WithLabelsTooAFullDiskUnderTheOutputIsNamed) {
  auto full = surroundings_with();
  full.out = "/dev/full";
  const auto job =
      run_program({"launch", "-n", "1", "--label", "sh", "-c", "while echo line; do sleep 0.1; done"}, full);
  EXPECT_EQ(job.code, 128 + SIGPIPE) << job.err;
  EXPECT_THAT(job.err, HasSubstr("lockstep launch: cannot write to the standard output: No space left on device\n"));
}

TEST(Launch, StartsThisVeryProgramWhereItsNameIsNotOnPath) {
  const Surroundings surroundings{.environment = {"PATH=/usr/bin:/bin"}, .starts_itself = true};
  const auto job = run_program({"launch", "-n", "1", "lockstep", "--version"}, surroundings);
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(job.out, run_program({"--version"}, surroundings).out);
}

TEST(Launch, HelpShowsWhereTheProgramStands) {
  EXPECT_THAT(run_program({"launch", "--help"}, surroundings_with()).out,
              HasSubstr("Usage: lockstep launch -n N [OPTION...] PROGRAM [ARGUMENT...]\n"));
}

TEST(Launch, BenchSaysThatItIsOfOneProcess) {
  const auto job =
      run_program({"launch", "-n", "2", from_environment("LOCKSTEP_BENCH_PROGRAM"), "step"}, surroundings_with());
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(job.err, HasSubstr("lockstep-bench measures the ranks of one process; start it without a launcher"));
}

}  // namespace launch_test
