// Labels: processes thorough
// Strangers at the ports of a job that trains: it ends with the weights of an undisturbed one, and says who was turned
// away. Whom the store lets in is comm/meeting/store_test.cpp's.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "cli/cli_fixture.hpp"
#include "comm/job_key.hpp"
#include "comm/meeting/sockets.hpp"
#include "comm/meeting/store_messages.hpp"
#include "running_job.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stop_token>
#include <thread>

namespace strangers_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// Where a process listens: TCP over IPv4.
std::set<int> ports_of(pid_t pid) {
  const std::string process = "/proc/" + std::to_string(pid);
  std::set<std::string> sockets;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(process + "/fd", error)) {
    sockets.insert(std::filesystem::read_symlink(entry.path(), error).string());
  }
  std::set<int> ports;
  std::ifstream table(process + "/net/tcp");
  std::string line;
  for (std::getline(table, line); std::getline(table, line);) {
    std::istringstream fields(line);
    std::string number, local, remote, state, skipped, inode;
    fields >> number >> local >> remote >> state;
    for (int i = 0; i < 5; ++i) fields >> skipped;
    fields >> inode;
    const bool listens = state == "0A" && sockets.contains("socket:[" + inode + "]");
    if (listens) ports.insert(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
  }
  return ports;
}

// Lets this process have as many descriptors as the system allows, at most 20,000. Gives how many.
int descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 20'000);
  setrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int>(limit.rlim_cur);
}

// The head that Gloo writes in front of each message, and alone to agree on one.
struct GlooHead {
  enum Kind : uint64_t { kMessage = 1, kOffers = 2, kWants = 3 };
  uint64_t bytes, kind, slot, offset, length, remote_offset;  // `bytes`: with the message
};

// The heads behind `at`, which moves behind the last one and its message. That may not have come yet.
std::vector<GlooHead> heads_in(const std::string& heard, size_t& at) {
  std::vector<GlooHead> heads;
  GlooHead head;
  while (at + sizeof head <= heard.size()) {
    std::memcpy(&head, heard.data() + at, sizeof head);
    heads.push_back(head);
    at += std::max<uint64_t>(head.bytes, sizeof head);
  }
  return heads;
}

class Connections {
 public:
  ~Connections() {
    for (const auto& one : all_) close(one.fd);
  }

  // Says no more, and can still listen.
  void hang_up() {
    for (const auto& one : all_) shutdown(one.fd, SHUT_WR);
  }

  bool open(int port, const std::string& words = "", std::chrono::milliseconds patience = 100ms) {
    const int fd = comm::connect_to("127.0.0.1", port, Clock::now() + patience);
    if (fd < 0) return false;
    all_.push_back({fd});
    say(fd, words);
    return true;
  }

  // Takes what has come. true: nothing more can come.
  bool listen() {
    bool all_have_ended = true;
    for (auto& one : all_) {
      char bytes[4096];
      ssize_t count = 0;
      while ((count = recv(one.fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0) one.heard.append(bytes, count);
      all_have_ended = all_have_ended && (count == 0 || errno != EAGAIN);
    }
    return all_have_ended;
  }

  // Takes each message that Gloo offers, and sends each that it waits for, with a text that means nothing.
  void play_along() {
    for (auto& one : all_) {
      for (const auto& head : heads_in(one.heard, one.answered)) {
        if (head.kind == GlooHead::kOffers)
          say(one.fd, text_of({sizeof head, GlooHead::kWants, head.slot, 0, head.length, 0}));
        if (head.kind == GlooHead::kWants) {
          say(one.fd, text_of({sizeof head + head.length, GlooHead::kMessage, head.slot, 0, head.length, 0}) +
                          std::string(head.length, 'x'));
        }
      }
    }
  }

  // Over each connection.
  std::vector<std::string> heard() const {
    std::vector<std::string> all;
    for (const auto& one : all_) all.push_back(one.heard);
    return all;
  }

 private:
  struct One {
    int fd;
    std::string heard = {};
    size_t answered = 0;  // so many of its bytes
  };

  static std::string text_of(const GlooHead& head) { return {reinterpret_cast<const char*>(&head), sizeof head}; }
  static void say(int fd, const std::string& words) { send(fd, words.data(), words.size(), MSG_NOSIGNAL); }

  std::vector<One> all_;
};

class StrangersAtAJob : public Cli {
 protected:
  // Each process leaves its number.
  Words words(const std::string& name, const std::string& epochs) const {
    return Words{"launch",
                 "-n",
                 "2",
                 "/bin/sh",
                 "-c",
                 "echo $$ >\"$0/$RANK.new\"; /bin/mv \"$0/$RANK.new\" \"$0/$RANK\"; echo $MASTER_PORT >\"$0/port\"; "
                 "exec \"$@\"",
                 notes_.path().string(),
                 from_environment("LOCKSTEP_PROGRAM")} +
           train({"--name", name, "--devices", "cpu", "--epochs", epochs, "--momentum", "0.9", "--lr", "0.02"});
  }

  Surroundings surroundings(const Words& variables = {}) const {
    return {.folder = work_.path(),
            .environment = Words{"PATH=" + notes_.path().string(), "LC_ALL=C.UTF-8"} + variables};
  }

  std::set<int> ports_of_ranks() const {
    std::set<int> ports;
    for (const char* rank : {"0", "1"}) ports.merge(ports_of(pid_in(notes_ / rank)));
    return ports;
  }

  void expect_undisturbed(const Finished& job, const std::string& name, const std::string& epochs) {
    EXPECT_EQ(job.code, 0) << job.err << job.out;
    ASSERT_EQ(run_program(words("undisturbed", epochs), surroundings()).code, 0);
    ASSERT_FALSE(metrics(name).empty());
    EXPECT_EQ(metrics(name).back().weights, metrics("undisturbed").back().weights);
  }

  const ScratchFolder notes_;
};

TEST_F(StrangersAtAJob, ThatTrainsChangeNothing) {
  Program job(words("disturbed", "30"), surroundings());
  ASSERT_TRUE(job.wait_for("epoch  2/30"));
  int store = 0;
  std::ifstream(notes_ / "port") >> store;
  Connections connections;
  ASSERT_TRUE(
      connections.open(store, std::string(comm::kProofBytes, 'x') + comm::message_of({"set", "failure", "hello"})));
  ASSERT_TRUE(connections.open(store, "GET / HTTP/1.1\r\n\r\n"));
  const int many = std::min(kSlowdown > 1 ? 300 : 10'000, descriptors() - 100);  // sanitizers look at memory
  std::cout << many << " silent strangers connect to the store" << std::endl;
  for (int i = 0; i < many; ++i) ASSERT_TRUE(connections.open(store, "", 5s)) << i;
  // Once the ranks are connected nobody else can connect to them.
  const auto ports = ports_of_ranks();
  EXPECT_GE(ports.size(), 2u);
  for (const int port : ports) EXPECT_FALSE(connections.open(port, std::string(100, '\0'))) << port;
  const auto ended = job.finish();
  EXPECT_THAT(ended.err, AllOf(HasSubstr("lockstep launch: a stranger at 127.0.0.1:"),
                               HasSubstr("was turned away from the job's store: it does not know the job's key\n"),
                               HasSubstr("was turned away from the job's store: there were too many of them\n")));
  expect_undisturbed(ended, "disturbed", "30");
}

class StrangersFirstInLine : public StrangersAtAJob {
 protected:
  void SetUp() override {
    if (std::getenv("LOCKSTEP_FAULTY_CONNECT") == nullptr) GTEST_SKIP() << "not with sanitizers";
  }

  // A rank is a second late at another one's port, where strangers sit down in its place. Where the ranks connect anew
  // it is late again, and strangers are first again. But nobody hears them.
  Finished job(const std::string& name, bool play_along) {
    const auto file = work_ / "fault";
    Program job(words(name, "2"),
                surroundings({"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_CONNECT"), "FAULT_TO=ranks",
                              "FAULT_AT=1,2", "FAULT_MILLISECONDS=1000", "FAULT_FILE=" + file.string()}));
    std::jthread strangers([&](const std::stop_token& end) {
      while (!std::filesystem::exists(file) && !end.stop_requested()) std::this_thread::sleep_for(5ms);
      std::map<int, int> seats;
      bool has_left = false;
      const auto leaving = Clock::now() + 1500ms;  // sooner than the ranks' patience ends
      for (const auto until = Clock::now() + kSlowdown * 20s; !end.stop_requested() && Clock::now() < until;) {
        if (!has_left && Clock::now() > leaving) {
          connections_.hang_up();
          has_left = true;
        }
        const auto ports = ports_of_ranks();
        for (int i = 0; i < 4; ++i) {
          for (const int port : ports) {
            const int64_t pair = i % 2;  // Gloo's numbers of the connections that are to come, in each rank
            const std::string words(reinterpret_cast<const char*>(&pair), sizeof pair);
            if (seats[port] < 20 && connections_.open(port, words, 0ms)) ++seats[port];
          }
          connections_.listen();
          if (play_along) connections_.play_along();
          std::this_thread::sleep_for(100us);
        }
      }
    });
    EXPECT_TRUE(job.wait_for("epoch 1/2"));
    strangers.request_stop();
    strangers.join();
    const auto ended = job.finish();
    EXPECT_TRUE(comes_true([&] { return connections_.listen(); }));
    return ended;
  }

  // Only the signs by which Gloo agrees on a message, and the texts by which ranks prove who they are
  // (proven_group.cpp). A tensor would have another slot.
  std::vector<GlooHead> heads_of_proofs_alone() const {
    std::vector<GlooHead> all;
    for (const auto& heard : connections_.heard()) {
      size_t end = 0;
      for (const auto& head : heads_in(heard, end)) {
        EXPECT_EQ(head.length, comm::JobKey::kBytes);
        EXPECT_THAT(head.slot >> 16, AnyOf(0x7ffd, 0x7ffe));
        all.push_back(head);
      }
      EXPECT_LE(heard.size(), std::min<size_t>(end, 500));
    }
    return all;
  }

  Connections connections_;
};

TEST_F(StrangersFirstInLine, AreFoundAndHearNoTensor) {
  const auto ended = job("late", /*play_along=*/false);
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr(" was closed, since one of them failed or a stranger had its place: neither saw a proof"),
                    HasSubstr("All have connected anew"), HasSubstr("lockstep: a stranger at 127.0.0.1:")));
  const auto heads = heads_of_proofs_alone();
  EXPECT_FALSE(heads.empty());
  for (const auto& head : heads) EXPECT_NE(head.kind, GlooHead::kMessage);
  expect_undisturbed(ended, "late", "2");
}

// Strangers get a rank's nonce and its proof, and have none to give.
TEST_F(StrangersFirstInLine, AreFoundAndHearNoTensorThoughTheyPlayAlong) {
  const auto ended = job("late", /*play_along=*/true);
  EXPECT_THAT(ended.err,
              AllOf(ContainsRegex("lockstep: a stranger was turned away at the port of rank [01] .*, where it had "
                                  "the place of rank [01] .*: it does not know the job's key"),
                    HasSubstr("All have connected anew"), HasSubstr("lockstep: a stranger at 127.0.0.1:")));
  const auto heads = heads_of_proofs_alone();
  EXPECT_GE(std::count_if(heads.begin(), heads.end(), [](auto& head) { return head.kind == GlooHead::kMessage; }), 2);
  expect_undisturbed(ended, "late", "2");
}

class KeysFromFiles : public testing::Test {
 protected:
  void SetUp() override {
    for (const std::string name : {"key", "other"}) {
      folder_.write(name, name + std::string(32, 'k'));
      ASSERT_EQ(chmod((folder_ / name).c_str(), 0600), 0);
    }
  }

  // Gives what two processes say, without a launcher, with a key each, or "" for none.
  std::vector<Finished> with_keys(const std::string& of_first, const std::string& of_second,
                                  const std::string& port = free_port(), const Words& variables = {}) const {
    const auto start = [&](int rank, const std::string& key) {
      Words all = as_rank(rank, 2, port, "3") + variables;
      if (!key.empty()) all.push_back("LOCKSTEP_JOB_KEY_FILE=" + (folder_ / key).string());
      auto surroundings = surroundings_with(all);
      surroundings.program = ranks_program();
      return std::make_unique<Program>(Words{"collectives", "cpu"}, surroundings);
    };
    const auto first = start(0, of_first), second = start(1, of_second);
    return {first->finish(), second->finish()};
  }

  const ScratchFolder folder_;
};

TEST_F(KeysFromFiles, AreForJobsStartedByHand) {
  const auto same = with_keys("key", "key");
  for (const auto& process : same) EXPECT_EQ(process.code, 0) << process.err;
  const auto different = with_keys("key", "other");
  EXPECT_THAT(different[0].err, AllOf(HasSubstr("lockstep: a stranger at 127.0.0.1:"),
                                      HasSubstr("turned away from the job's store: it does not know the job's key"),
                                      HasSubstr("process 0 of 2 waited 3 s for process 1")));
  EXPECT_THAT(different[1].err, AllOf(HasSubstr("process 1 of 2 cannot use the store at 127.0.0.1:"),
                                      HasSubstr("Have all machines the same LOCKSTEP_JOB_KEY_FILE, or none?")));
  const auto missing = with_keys("none", "none");
  for (const auto& process : missing) EXPECT_THAT(process.err, HasSubstr("head -c 32 /dev/urandom"));
}

// Its agent's store answers everybody.
TEST_F(KeysFromFiles, ProtectTheConnectionsOfRanksUnderTorchrun) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto under_torchrun = [&](const std::string& of_first, const std::string& of_second) {
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    return with_keys(of_first, of_second, std::to_string(store->getPort()), {"TORCHELASTIC_USE_AGENT_STORE=True"});
  };
  for (const auto& process : under_torchrun("key", "key")) EXPECT_EQ(process.code, 0) << process.err;
  for (const auto& process : under_torchrun("key", "other")) {
    EXPECT_THAT(process.err, HasSubstr("does not know the job's key"));
  }
  for (const auto& process : under_torchrun("key", "")) {
    EXPECT_THAT(process.err, HasSubstr("with a job's key (LOCKSTEP_JOB_KEY_FILE)"));
  }
}

}  // namespace strangers_test
