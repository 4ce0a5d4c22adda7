// What goes wrong between processes: every process says who is to blame, soon, and nothing waits for ever.
#include "job.hpp"

#include <netinet/in.h>
#include <sys/socket.h>

#include "comm/sockets.hpp"

#include <chrono>
#include <thread>

namespace process_failures_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

struct Timed {
  Finished job;
  std::chrono::steady_clock::duration took;
};

Timed timed(int processes, const Words& words, const Words& variables = {}) {
  const auto start = std::chrono::steady_clock::now();
  auto job = run_launched(processes, words, variables);
  return {std::move(job), std::chrono::steady_clock::now() - start};
}

TEST(ProcessFailures, ARankThatThrowsIsNamedByAllSoon) {
  for (const auto& [processes, devices] : {std::pair(2, "cpu"), std::pair(3, "cpu"), std::pair(2, "4xcpu")}) {
    for (const char* where : {"allreduce", "recv"}) {
      const auto [job, took] = timed(processes, {"throws", devices, where});
      EXPECT_EQ(job.code, 3) << job.err;
      for (int process = 0; process < processes; ++process) {
        EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(process) + ": rank 1 (cpu): out of luck\n"))
            << devices << " " << where;
      }
      EXPECT_LT(took, 20s);  // a second or two, and what a loaded machine needs to start
      EXPECT_THAT(job.err, Not(HasSubstr("ending the others")));
    }
  }
}

TEST(ProcessFailures, AKilledProcessIsNamedByTheOthers) {
  for (const int processes : {2, 3}) {
    const auto [job, took] = timed(processes, {"dies"});
    EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
    EXPECT_THAT(job.err, HasSubstr("lockstep launch: rank 1 was ended by signal 9 (Killed)"));
    for (const int survivor : {0, 2}) {
      if (survivor >= processes) continue;
      EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(survivor) + ": the process of rank 1 (cpu) is gone"));
    }
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, AKilledServerOrWorkerOfAParameterServerIsNamedByTheOthers) {
  for (const int victim : {1, 2}) {
    const auto [job, took] = timed(3, {"serves", "cpu", std::to_string(victim)});
    EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
    for (const int survivor : {0, 1, 2}) {
      if (survivor == victim) continue;
      EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(survivor) + ": the process of rank " +
                                     std::to_string(victim) + " (cpu) is gone"));
    }
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, ATimeoutSaysWhoWasMissingAndWhere) {
  const auto [job, took] = timed(2, {"computes_on"});
  EXPECT_EQ(job.code, 3);
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(job.err,
                HasSubstr(std::string(process) +
                          ": rank 0 (cpu) waited 1 s in allreduce(sum) of float [2, 3] (collective call 1) for "
                          "rank 1 (cpu), which is not there"));
  }
}

TEST(ProcessFailures, ARankThatReturnsWithoutTheOthersCallIsNamed) {
  for (const char* devices : {"cpu", "4xcpu"}) {
    const auto [job, took] = timed(2, {"returns_early", devices});
    EXPECT_EQ(job.code, 3);
    EXPECT_THAT(job.err, AllOf(HasSubstr("process 0: rank 1 (cpu) returned without the call"),
                               HasSubstr("process 1: rank 1 (cpu) returned without the call"),
                               HasSubstr("allreduce(sum) of float [2, 3]")));
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, PollingEndsAsWaitingDoes) {
  for (const char* devices : {"cpu", "4xcpu"}) {
    const auto [job, took] = timed(2, {"returns_early", devices, "poll"});
    EXPECT_EQ(job.code, 3);
    for (const char* process : {"process 0", "process 1"}) {
      EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": rank 1 (cpu) returned without the call"));
    }
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, ACallThatNobodyAnswersIsAnErrorOfAll) {
  for (const auto& [processes, devices] : {std::pair(2, "cpu"), std::pair(3, "cpu"), std::pair(2, "4xcpu")}) {
    const auto [job, took] = timed(processes, {"asks_in_vain", devices});
    const auto [message, took_too] = timed(processes, {"asks_in_vain", devices, "send"});
    for (int process = 0; process < processes; ++process) {
      const std::string name = "process " + std::to_string(process);
      EXPECT_THAT(job.err, HasSubstr(name + ": rank 1 (cpu) called allreduce(sum) of float [2] (collective call 1) and "
                                            "did not wait for it; it never came about, for want of rank 0 (cpu)"));
      EXPECT_THAT(message.err, HasSubstr(name + ": rank 1 (cpu) called send to rank 0 (cpu) once, which called recv "
                                                "from rank 1 (cpu) 0 times"));
    }
    EXPECT_LT(std::max(took, took_too), 20s);
  }
}

TEST(ProcessFailures, RanksOfAProcessThatGiveTheSameMemoryAreRefused) {
  const auto [job, took] = timed(2, {"shares_memory", "4xcpu"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, AllOf(HasSubstr("gave the same memory to allreduce(sum) of float [100]"),
                             HasSubstr("each rank needs a tensor of its own")));
}

TEST(ProcessFailures, CallsThatDifferAreShownBoth) {
  for (const char* devices : {"cpu", "4xcpu"}) {
    const auto [job, took] = timed(2, {"calls_otherwise", devices});
    EXPECT_EQ(job.code, 3);
    for (const char* process : {"process 0", "process 1"}) {
      EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": "));
    }
    EXPECT_THAT(job.err,
                AllOf(HasSubstr("calls differ"), HasSubstr("rank 1 (cpu) called broadcast(root 0) of float [5]"),
                      HasSubstr(" called allreduce(sum) of float [2, 3]")));
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, CallsThatDifferInOperationOrSizeAloneNeverMeet) {
  for (const auto& [processes, devices] : {std::pair(2, "cpu"), std::pair(3, "cpu"), std::pair(2, "4xcpu")}) {
    for (const auto& [how, call] :
         {std::pair("max", "allreduce(max) of float [2, 3]"), std::pair("long", "allreduce(sum) of float [1000000]"),
          std::pair("empty", "allreduce(sum) of float [0]")}) {
      const auto [job, took] = timed(processes, {"calls_otherwise", devices, how});
      EXPECT_EQ(job.code, 3) << job.err;
      for (int process = 0; process < processes; ++process) {
        EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(process) + ": "));
      }
      EXPECT_THAT(job.err, AllOf(HasSubstr("calls differ"), HasSubstr(std::string("rank 1 (cpu) called ") + call),
                                 HasSubstr(" called allreduce(sum) of float [2, 3]")));
      EXPECT_LT(took, 20s);
    }
  }
}

TEST(ProcessFailures, CallsThatDifferInAGroupEndTheWholeRun) {
  for (const auto& [processes, devices] : {std::pair(3, "cpu"), std::pair(2, "4xcpu")}) {
    const auto [job, took] = timed(processes, {"calls_otherwise_in_a_group", devices});
    EXPECT_EQ(job.code, 3) << job.err;
    for (int process = 0; process < processes; ++process) {
      EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(process) + ": "));
    }
    EXPECT_THAT(job.err,
                AllOf(HasSubstr("calls differ"), HasSubstr("rank 1 (cpu) called broadcast(root 0) of float [5]"),
                      HasSubstr("rank 0 (cpu) called allreduce(sum) of float [2, 3]")));
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, PartsOfAnAlltoallThatDoNotFitAreShown) {
  for (const int processes : {2, 3}) {
    const auto [job, took] = timed(processes, {"parts_do_not_fit"});
    EXPECT_EQ(job.code, 3) << job.err;
    for (int process = 0; process < processes; ++process) {
      EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(process) + ": "));
    }
    EXPECT_THAT(job.err, HasSubstr("alltoall: rank 0 sends float [6] to rank 1, which expects float [9]"));
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, MessagesThatDoNotFitAreShownBoth) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "size"});
  EXPECT_EQ(job.code, 3) << job.err;
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": "));
  }
  EXPECT_THAT(job.err, AllOf(HasSubstr("the two sides of message 1 from rank 0 to rank 1, tag 7 differ"),
                             HasSubstr("rank 0 (cpu) called send to rank 1 of float [1000000]"),
                             HasSubstr("rank 1 (cpu) called recv from rank 0 of float [3]")));
  EXPECT_LT(took, 20s);
}

TEST(ProcessFailures, AMessageThatCannotComeEndsTheWaitForIt) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "none"});
  EXPECT_EQ(job.code, 3) << job.err;
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": rank 0 (cpu) returned without the send that rank 1 (cpu) "
                                                          "waits for: recv from rank 0 of float [3]"));
  }
  EXPECT_LT(took, 20s);

  const auto [tag, took_too] = timed(2, {"message_fails", "cpu", "tag"});
  EXPECT_THAT(tag.err, HasSubstr("a message's tag is 1048576; between processes tags go from 0 to 32767"));
}

TEST(ProcessFailures, MessagesThatComeFromAnyRankAreNotReceivedFromOne) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "any"});
  EXPECT_EQ(job.code, 3) << job.err;
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": rank 1 (cpu): a recv from rank 0 has the tag 16384, whose "
                                                          "messages were received from any rank"));
  }
  EXPECT_LT(took, 20s);
}

TEST(ProcessFailures, RanksThatWaitForEachOtherAreToldSo) {
  for (const char* how : {"recv", "mixed"}) {
    const auto [job, took] = timed(2, {"waits_crosswise", "cpu", how});
    EXPECT_EQ(job.code, 3) << job.err;
    for (const char* process : {"process 0", "process 1"}) {
      EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": the ranks wait for each other: "));
    }
    EXPECT_LT(took, 20s);
  }
}

TEST(ProcessFailures, AnotherConfigurationIsRefusedWithBothShown) {
  const auto [job, took] = timed(3, {"is_configured_otherwise"});
  EXPECT_EQ(job.code, 3);
  for (const char* process : {"process 0", "process 1", "process 2"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": process 1 runs another program or configuration"));
  }
  EXPECT_THAT(job.err, AllOf(HasSubstr("timeout 77 s"), HasSubstr("timeout 88 s"), HasSubstr("program process_ranks")));
}

// Variables of torchrun, for a process without a launcher.
Words as_rank(int rank, const std::string& port, const std::string& patience = "1.5") {
  return {"RANK=" + std::to_string(rank),
          "WORLD_SIZE=2",
          "LOCAL_RANK=" + std::to_string(rank),
          "LOCAL_WORLD_SIZE=2",
          "MASTER_PORT=" + port,
          "MASTER_ADDR=127.0.0.1",
          "LOCKSTEP_RENDEZVOUS_TIMEOUT=" + patience};
}

// A port that is free at this moment, below those that the system hands out by itself.
std::string free_port() {
  for (int port = 20000 + getpid() % 10000;; ++port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool is_free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(fd);
    if (is_free) return std::to_string(port);
  }
}

TEST(ProcessFailures, APeerThatNeverComesIsNamedAtTheDeadline) {
  const auto start = std::chrono::steady_clock::now();
  const auto host = run_alone({"collectives"}, as_rank(0, free_port()));
  EXPECT_EQ(host.code, 3);
  EXPECT_THAT(host.err, HasSubstr("process 0 of 2 waited 1.5 s for process 1, which did not come to run()"));

  const std::string port = free_port();
  const auto client = run_alone({"collectives"}, as_rank(1, port));
  EXPECT_EQ(client.code, 3);
  EXPECT_THAT(client.err, HasSubstr("process 1 of 2 waited 1.5 s for the store that rank 0's process should keep at "
                                    "127.0.0.1:" +
                                    port));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST(ProcessFailures, WithoutALauncherRank0KeepsTheStore) {
  const std::string port = free_port();
  auto surroundings = surroundings_with(as_rank(1, port, "60"));
  surroundings.program = ranks_program();
  Program other({"throws"}, surroundings);
  const auto host = run_alone({"throws"}, as_rank(0, port, "60"));
  EXPECT_THAT(host.err, HasSubstr("process 0: rank 1 (cpu): out of luck\n"));
  EXPECT_THAT(other.finish().err, HasSubstr("process 1: rank 1 (cpu): out of luck\n"));
}

TEST(ProcessFailures, AStoreThatFreezesEndsTheRun) {
  const std::string port = free_port();
  auto surroundings = surroundings_with(as_rank(0, port, "60"));
  surroundings.program = ranks_program();
  Program host({"freezes"}, surroundings);
  const auto start = std::chrono::steady_clock::now();
  const auto client = run_alone({"freezes"}, as_rank(1, port, "60"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 40s);
  EXPECT_EQ(client.code, 3);
  EXPECT_THAT(client.err, HasSubstr("process 1: the process of rank 0 (cpu) is gone: the store that it keeps does not "
                                    "answer"));
  host.send(SIGKILL);
  EXPECT_EQ(host.finish().signal, SIGKILL);
}

TEST(ProcessFailures, AStoreThatIsFrozenFromTheStartEndsTheRun) {
  const std::string port = free_port();
  auto surroundings = surroundings_with(as_rank(0, port, "60"));
  surroundings.program = ranks_program();
  Program host({"collectives"}, surroundings);
  const auto listens = [&] {
    return comm::answers("127.0.0.1", std::stoi(port), std::chrono::steady_clock::now() + 1s);
  };
  while (!listens()) std::this_thread::sleep_for(10ms);
  host.send(SIGSTOP);  // the system accepts connections for it
  const auto start = std::chrono::steady_clock::now();
  const auto client = run_alone({"collectives"}, as_rank(1, port, "60"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 40s);
  EXPECT_EQ(client.code, 3);
  EXPECT_THAT(client.err, HasSubstr("process 1 of 2 cannot use the store at 127.0.0.1:" + port));
  host.send(SIGKILL);
  EXPECT_EQ(host.finish().signal, SIGKILL);
}

TEST(ProcessFailures, AFrozenProcessIsNamedByTheOthers) {
  const auto [job, took] = timed(3, {"freezes"});
  for (const char* process : {"process 1", "process 2"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": the process of rank 0 (cpu) is gone"));
  }
  EXPECT_LT(took, 60s);
}

TEST(ProcessFailures, AnIncompleteEnvironmentIsRefusedByName) {
  const auto job = run_alone({"collectives"}, {"RANK=0", "WORLD_SIZE=2"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, HasSubstr("LOCAL_RANK, LOCAL_WORLD_SIZE not set"));
}

}  // namespace process_failures_test
