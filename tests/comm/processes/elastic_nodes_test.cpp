// Labels: processes program
// Elastic jobs with a launcher on each of several machines. Here all are on this one, and meet over loopback.
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/meeting/job_store.hpp"
#include "elastic_fixture.hpp"

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

namespace elastic_nodes_test {

using namespace lockstep;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr int kStoppedOnRequest = 128 + SIGTERM;

class ElasticNodes : public Elastic {
 protected:
  ElasticNodes() {
    std::ofstream(key_) << std::string(32, 'k');
    std::filesystem::permissions(key_, std::filesystem::perms::owner_read);
  }

  // The launcher of one machine, with one process.
  Words node(int number, const std::string& name, const Words& more, const Words& launch = {"--nodes", "2"}) const {
    return job(1, launch + Words{"--node", std::to_string(number), "--master", "127.0.0.1:" + port_}, name, more);
  }

  Surroundings with_key(const Words& more = {}) const {
    auto surroundings = without_gnuplot();
    surroundings.environment.push_back("LOCKSTEP_JOB_KEY_FILE=" + key_);
    for (const auto& variable : more) surroundings.environment.push_back(variable);
    return surroundings;
  }

  // A process of a job that is started by hand.
  Surroundings by_hand(int rank, int processes) const {
    auto surroundings = with_key(as_rank(rank, processes, port_, "60"));
    surroundings.starts_itself = true;
    return surroundings;
  }

  const std::string key_ = (notes_ / "key").string();
  const std::string port_ = free_port();
};

TEST_F(ElasticNodes, LossesOfProcessesAndOfALauncherChangeNoBit) {
  Program first(node(0, "killed", kEndless), with_key());
  std::optional<Program> second(std::in_place, node(1, "killed", kEndless), with_key());
  ASSERT_TRUE(first.wait_for("epoch      2/"));
  kill_member(1);
  ASSERT_TRUE(first.wait_for("process 2 has joined"));
  kill_member(0);  // who keeps the run. A process of the other machine does from here on
  ASSERT_TRUE(first.wait_for("process 3 has joined"));

  second->send(SIGKILL);  // its process goes with it
  ASSERT_TRUE(first.wait_for("node 1 is gone: its launcher gives no sign of life; the others go on without it"));
  EXPECT_EQ(second->finish().signal, SIGKILL);
  second.emplace(node(1, "killed", kEndless), with_key());  // as a machine that comes up again
  ASSERT_TRUE(first.wait_for("process 4 has joined"));

  second->send(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(4));  // longer than an agent's silence
  second->send(SIGCONT);
  ASSERT_TRUE(second->wait_for("the others have gone on without it; it joins again"));
  ASSERT_TRUE(first.wait_for("process 5 has joined"));

  second->send(SIGTERM);  // ends the whole job
  const auto ended = first.finish(), other = second->finish();
  EXPECT_EQ(ended.code, kStoppedOnRequest) << ended.err << ended.out;
  EXPECT_EQ(other.code, kStoppedOnRequest) << other.err << other.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 1 of node 1 is gone: it was ended by signal 9 (Killed); the others"),
                               HasSubstr("process 2 starts in the place of rank 1, on node 1"),
                               HasSubstr("node 1 has come"), Not(HasSubstr("error:"))));
  expect_bits_of_peace("killed");
}

// As one that was suspended, or cut off: nobody there can kill its process before that goes on.
TEST_F(ElasticNodes, AProcessThatIsOutWhenItWakesDisturbsNobody) {
  Program first(node(0, "woken", kEndless), with_key()), second(node(1, "woken", kEndless), with_key());
  const auto stand_still = [&](int process) {
    second.send(SIGSTOP);
    kill_member(process, SIGSTOP);
  };
  // While its launcher stands still.
  const auto wake = [&](int process) {
    kill_member(process, SIGCONT);
    ASSERT_TRUE(second.wait_for("the others have gone on without process " + std::to_string(process) + " of the job"));
    EXPECT_TRUE(wait_for_state(pid_in(notes_ / std::to_string(process)), 'Z'));
    second.send(SIGCONT);
  };
  ASSERT_TRUE(first.wait_for("epoch      2/"));
  stand_still(1);
  ASSERT_TRUE(first.wait_for("node 1 is gone: its launcher gives no sign of life; the others go on without it"));
  const size_t epochs = metrics("woken").size();
  EXPECT_TRUE(comes_true([&] { return metrics("woken").size() > epochs + 2; }));
  wake(1);
  ASSERT_TRUE(first.wait_for("process 2 has joined"));

  kill_member(0);  // so process 2, on node 1, keeps the run
  ASSERT_TRUE(first.wait_for("process 3 has joined"));
  stand_still(2);
  ASSERT_TRUE(first.wait_for("runs/woken is locked by a process that the others have gone on without"));
  ASSERT_TRUE(first.wait_for("for 150 s at most"));  // half of --timeout
  wake(2);
  ASSERT_TRUE(first.wait_for("process 4 has joined"));
  first.send(SIGTERM);
  const auto ended = first.finish();
  EXPECT_EQ(ended.code, kStoppedOnRequest) << ended.err << ended.out;
  EXPECT_EQ(second.finish().code, kStoppedOnRequest);
  EXPECT_THAT(leftovers(), IsEmpty());
  expect_bits_of_peace("woken");
}

TEST_F(ElasticNodes, TheLossOfTheFirstEndsAllAndIsSaid) {
  Program first(node(0, "lost", kEndless), with_key());
  Program second(node(1, "lost", kEndless), with_key());
  ASSERT_TRUE(first.wait_for("epoch      2/"));
  const pid_t process = process_of(1, port_);
  ASSERT_GT(process, 0);
  first.send(SIGKILL);
  const auto other = second.finish();
  EXPECT_EQ(other.code, 1) << other.err;
  EXPECT_THAT(other.err, HasSubstr("node 0 is gone: its launcher keeps the job's store at 127.0.0.1:" + port_));
  EXPECT_EQ(process_of(1, port_), -1) << "its process is still there";
}

// Somebody's program fails by itself.
TEST_F(ElasticNodes, AFailureOnOneMachineEndsAll) {
  const Words launch = {"launch", "-n", "1", "--elastic", "--nodes", "2", "--master", "127.0.0.1:" + port_, "--node"};
  const Words program = {"/bin/sh", "-c", "test $RANK = 0 || exit 7; exec /bin/sleep 100"};
  Program first(launch + Words{"0"} + program, with_key());
  const auto second = run_program(launch + Words{"1"} + program, with_key());
  const auto ended = first.finish();
  EXPECT_EQ(ended.code, 7) << ended.err;
  EXPECT_EQ(second.code, 7) << second.err;
  EXPECT_THAT(ended.err, HasSubstr("process 1 of node 1 is gone: it ended with exit code 7"));
}

// Its process knows of several machines, and the first one's do not.
TEST_F(ElasticNodes, ASecondMachineComesToAJobOfOne) {
  const Words machines = {"--nodes", "1", "--max-nodes", "2"};
  Program first(node(0, "grown", kEndless, machines), with_key());
  ASSERT_TRUE(first.wait_for("epoch      1/"));
  Program second(node(1, "grown", kEndless, machines), with_key());
  ASSERT_TRUE(first.wait_for("process 1 has joined"));
  second.send(SIGTERM);
  EXPECT_EQ(first.finish().code, kStoppedOnRequest);
  EXPECT_EQ(second.finish().code, kStoppedOnRequest);
}

// A launcher lives until it has ended its processes, however long they take: nobody says that its machine is gone.
TEST_F(ElasticNodes, ALauncherThatWaitsForItsProcessesToEndIsThere) {
  const Words launch = {"launch", "-n", "1", "--elastic", "--nodes", "2", "--master", "127.0.0.1:" + port_, "--node"};
  const Words program = {"/bin/sh", "-c",
                         "test $RANK = 0 || trap '/bin/sleep 5; exit 143' TERM; echo rank $RANK is up; "
                         "while :; do /bin/sleep 0.1; done"};
  Program first(launch + Words{"0"} + program, with_key()), second(launch + Words{"1"} + program, with_key());
  ASSERT_TRUE(first.wait_for("rank 0 is up"));
  ASSERT_TRUE(second.wait_for("rank 1 is up"));
  first.send(SIGTERM);
  const auto ended = first.finish();
  EXPECT_EQ(ended.code, kStoppedOnRequest) << ended.err;
  EXPECT_EQ(second.finish().code, kStoppedOnRequest);
  EXPECT_THAT(ended.err, Not(HasSubstr("launch: node 1 is gone")));
}

TEST_F(ElasticNodes, AProcessTooManyIsRefusedOnceAndTheOthersGoOn) {
  const Words endless = kEndless + Words{"--elastic", "1:1"}, machines = {"--nodes", "1", "--max-nodes", "2"};
  Program first(node(0, "full", endless, machines), with_key());
  ASSERT_TRUE(first.wait_for("epoch      1/"));
  Program second(node(1, "full", endless, machines), with_key());
  ASSERT_TRUE(first.wait_for("process 1 of node 1 is gone: it ended with exit code 1; the others go on without it"));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than until a successor would start
  first.send(SIGTERM);
  const auto ended = first.finish(), other = second.finish();
  EXPECT_EQ(ended.code, kStoppedOnRequest) << ended.err << ended.out;
  EXPECT_THAT(ended.err, Not(HasSubstr("process 2 starts")));
  EXPECT_THAT(other.err, HasSubstr("process 1 of an elastic job is one too many: 1 run, and it is to have at most 1"));
}

TEST_F(ElasticNodes, AMachineWhoseProgramIsMissingEndsAll) {
  const Words launch = {"launch", "-n", "1", "--elastic", "--nodes", "2", "--master", "127.0.0.1:" + port_, "--node"};
  Program first(launch + Words{"0", "/bin/sleep", "100"}, with_key());
  const auto second = run_program(launch + Words{"1", "/no/such/program"}, with_key());
  const auto ended = first.finish();
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(second.code, 1) << second.err;
  EXPECT_THAT(ended.err, HasSubstr("process 1 of node 1 is gone: cannot start /no/such/program"));
}

TEST_F(ElasticNodes, StartedByHandAProcessIsStartedAgain) {
  const Words words = settings("hand", "cpu") + kEndless + Words{"--elastic", "1:3"};
  Program first(words, by_hand(0, 2)), second(words, by_hand(1, 2));
  ASSERT_TRUE(first.wait_for("epoch      2/"));
  ASSERT_EQ(kill(process_of(1, port_), SIGKILL), 0);
  ASSERT_TRUE(first.wait_for("process 2 has joined"));
  Program third(words, by_hand(2, 3));  // one more comes while it runs
  ASSERT_TRUE(first.wait_for("process 3 has joined"));
  ASSERT_EQ(kill(process_of(0, port_), SIGKILL), 0);
  ASSERT_TRUE(first.wait_for("process 4 has joined"));
  first.send(SIGTERM);
  const auto ended = first.finish();
  EXPECT_EQ(ended.code, kStoppedOnRequest) << ended.err << ended.out;
  EXPECT_EQ(second.finish().code, kStoppedOnRequest);
  EXPECT_EQ(third.finish().code, kStoppedOnRequest);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("node 2 has come"), Not(HasSubstr("error:"))));
  expect_bits_of_peace("hand");
}

// As torchrun's agent keeps it, at port_. It answers everybody, and outlives a restart of the workers.
c10::intrusive_ptr<c10d::Store> agents_store(const std::string& port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(port));
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

Words as_worker(int rank, int workers, const std::string& port, const std::string& restarts) {
  return as_rank(rank, workers, port, "60") + Words{"TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RUN_ID=none",
                                                    "TORCHELASTIC_RESTART_COUNT=" + restarts};
}

// Nobody needs a key on one machine. Each of torchrun's agents counts the restarts of its own workers.
TEST_F(ElasticNodes, AsWorkersOfTorchrunTheyMeetAtAPortOfTheirOwn) {
  const auto store = agents_store(port_);
  store->set("lockstep/torchrun-none/port", free_port());  // of a worker that is gone: nobody listens there any more
  const Words words = settings("torchrun", "cpu") + kEndless + Words{"--elastic", "2:3"};
  const auto worker = [&](int rank) {
    auto surroundings = without_gnuplot();
    surroundings.environment = surroundings.environment + as_worker(rank, 3, port_, std::to_string(rank));
    surroundings.starts_itself = true;
    return surroundings;
  };
  Program second(words, worker(1)), third(words, worker(2)), first(words, worker(0));
  ASSERT_TRUE(first.wait_for("epoch      2/"));
  ASSERT_EQ(kill(process_of(2), SIGKILL), 0);
  ASSERT_TRUE(first.wait_for("process 3 has joined"));
  ASSERT_EQ(kill(process_of(0), SIGKILL), 0);
  ASSERT_TRUE(first.wait_for("process 4 has joined"));
  third.send(SIGTERM);
  const auto ended = first.finish();
  EXPECT_EQ(ended.code, kStoppedOnRequest) << ended.err << ended.out;
  EXPECT_EQ(second.finish().code, kStoppedOnRequest);
  EXPECT_EQ(third.finish().code, kStoppedOnRequest);
  EXPECT_THAT(ended.err, Not(HasSubstr("error:")));
  EXPECT_THAT(leftovers(), IsEmpty());
  expect_bits_of_peace("torchrun");
}

// The way for a program of one's own: torchrun --no-python … lockstep launch -n 1 --elastic PROGRAM
TEST_F(ElasticNodes, AsWorkersOfTorchrunLaunchersStartOneJob) {
  const auto store = agents_store(port_);
  const auto launch = [&](const std::string& processes) {
    return Words{"launch",
                 "-n",
                 processes,
                 "--elastic",
                 "/bin/sh",
                 "-c",
                 "echo rank $RANK of $WORLD_SIZE, here $LOCAL_RANK of $LOCAL_WORLD_SIZE"};
  };
  const auto worker = [&](int rank, const Words& more = {}) {
    auto surroundings = without_gnuplot();
    surroundings.environment = surroundings.environment + more + as_worker(rank, 2, port_, "0");
    return surroundings;
  };
  Program first(launch("1"), worker(0));
  const auto second = run_program(launch("1"), worker(1)), ended = first.finish();
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(ended.out, "rank 0 of 2, here 0 of 2\n");
  EXPECT_EQ(second.out, "rank 1 of 2, here 1 of 2\n");
  EXPECT_THAT(run_program(launch("2"), worker(0)).err,
              AllOf(HasSubstr("torchrun started 2 launchers on this machine"), HasSubstr("Give -n 1")));
  EXPECT_THAT(run_program(launch("2"), worker(0, {"LOCAL_WORLD_SIZE=1"})).err,  // the second is on another machine
              AllOf(HasSubstr("needs a key"), HasSubstr("LOCKSTEP_JOB_KEY_FILE")));
}

TEST_F(ElasticNodes, WhatDoesNotFitIsRefused) {
  const auto says = [&](const Words& words, const Surroundings& surroundings) {
    const auto ended = run_program(words, surroundings);
    EXPECT_NE(ended.code, 0);
    return ended.err;
  };
  auto without_key = without_gnuplot();
  EXPECT_THAT(
      says({"launch", "-n", "1", "--elastic", "--nodes", "2", "--node", "0", "--master", "10.1.2.3:4000", "true"},
           without_key),
      AllOf(HasSubstr("needs a key"), HasSubstr("LOCKSTEP_JOB_KEY_FILE")));
  EXPECT_THAT(says({"launch", "-n", "1", "--nodes", "2", "true"}, with_key()), HasSubstr("are for --elastic"));
  EXPECT_THAT(says({"launch", "-n", "1", "--elastic", "--nodes", "2", "true"}, with_key()),
              HasSubstr("--nodes needs --node"));
  EXPECT_THAT(says(node(0, "none", {}), with_key({"LOCKSTEP_RENDEZVOUS_TIMEOUT=0.2"})),
              HasSubstr("no launcher has come from node 1 within 0.2 s"));

  Program first(node(0, "two", kEndless), with_key());
  EXPECT_THAT(
      says(node(1, "two", {}, {"--nodes", "2", "--max-nodes", "3"}), with_key()),
      HasSubstr("node 1 was started with -n 1 on at most 3 machines, and node 0 with -n 1 on at most 2 machines"));
  EXPECT_THAT(says(node(2, "two", {}, {"--nodes", "3"}), with_key()),  // of another job, whose first is not here
              AllOf(HasSubstr("node 2 was started with -n 1 on at most 3 machines, and node 0 with -n 1 on at most 2"),
                    HasSubstr("give each job a port of its own")));
  Program second(node(1, "two", kEndless), with_key());
  ASSERT_TRUE(first.wait_for("epoch      2/"));
  EXPECT_THAT(says(node(1, "two", {}), with_key()), HasSubstr("two agents say that they are node 1"));
  first.send(SIGTERM);
  EXPECT_EQ(first.finish().code, kStoppedOnRequest);
  EXPECT_EQ(second.finish().code, kStoppedOnRequest);

  const Words bounds = settings("refused", "cpu") + Words{"--elastic", "2:4"};
  EXPECT_THAT(says(bounds, without_key), HasSubstr("--elastic needs several processes"));
  EXPECT_THAT(says(bounds, with_key(as_rank(0, 5, port_, "1"))),
              HasSubstr("--elastic 2:4 does not go with the 5 processes that"));
  EXPECT_THAT(says(Words{"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")} + bounds, without_key),
              HasSubstr("--elastic is for lockstep launch too"));
  EXPECT_THAT(says(settings("refused", "cpu") + Words{"--elastic", "4:2"}, without_key),
              HasSubstr("4:2 is not MIN:MAX"));
}

// Two machines that do not share the run's folder.
TEST_F(ElasticNodes, ARunsFolderThatIsNotSharedIsRefused) {
  const ScratchFolder elsewhere;
  auto there = with_key();
  there.folder = elsewhere.path();
  Program first(node(0, "shared", {}), with_key());
  const auto second = run_program(node(1, "shared", {}), there);
  const auto ended = first.finish();
  EXPECT_EQ(ended.code, 1) << ended.err << ended.out;
  EXPECT_EQ(second.code, 1) << second.err << second.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("is not the same one on all machines: rank 1 of 2"), HasSubstr("NFS")));
}

}  // namespace elastic_nodes_test
