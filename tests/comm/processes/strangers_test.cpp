// Labels: processes
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
#include "comm/meeting/sockets.hpp"
#include "comm/meeting/store_messages.hpp"
#include "running_job.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
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

// That this process may have, once it has taken all that the system lets it have.
int descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 20'000);
  setrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int>(limit.rlim_cur);
}

class Connections {
 public:
  ~Connections() { hang_up(); }

  void hang_up() {
    for (const int fd : fds_) close(fd);
    fds_.clear();
  }

  bool open(int port, const std::string& words = "", std::chrono::milliseconds patience = 100ms) {
    const int fd = comm::connect_to("127.0.0.1", port, Clock::now() + patience);
    if (fd < 0) return false;
    fds_.push_back(fd);
    send(fd, words.data(), words.size(), MSG_NOSIGNAL);
    return true;
  }

 private:
  std::vector<int> fds_;
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

// A rank is a second late at another one's port, where strangers sit down in its place. Where the ranks connect anew it
// is late again, and strangers are first again. But nobody hears them.
TEST_F(StrangersAtAJob, WhoAreFirstInLineAreFound) {
  if (std::getenv("LOCKSTEP_FAULTY_CONNECT") == nullptr) GTEST_SKIP() << "not with sanitizers";
  const auto file = work_ / "fault";
  Program job(words("late", "2"),
              surroundings({"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_CONNECT"), "FAULT_TO=ranks",
                            "FAULT_AT=1,2", "FAULT_MILLISECONDS=1000", "FAULT_FILE=" + file.string()}));
  std::jthread strangers([&](const std::stop_token& end) {
    while (!std::filesystem::exists(file) && !end.stop_requested()) std::this_thread::sleep_for(5ms);
    Connections connections;
    std::map<int, int> seats;
    bool has_left = false;
    const auto leaving = Clock::now() + 1500ms;  // sooner than the ranks' patience ends
    for (const auto until = Clock::now() + kSlowdown * 20s; !end.stop_requested() && Clock::now() < until;) {
      if (!has_left && Clock::now() > leaving) {
        connections.hang_up();
        has_left = true;
      }
      const auto ports = ports_of_ranks();
      for (int i = 0; i < 4; ++i) {
        for (const int port : ports) {
          const int64_t pair = i % 2;  // Gloo's numbers of the connections that are to come, in each rank
          const std::string words(reinterpret_cast<const char*>(&pair), sizeof pair);
          if (seats[port] < 20 && connections.open(port, words, 0ms)) ++seats[port];
        }
        std::this_thread::sleep_for(100us);
      }
    }
  });
  EXPECT_TRUE(job.wait_for("epoch 1/2"));
  strangers.request_stop();
  strangers.join();
  const auto ended = job.finish();
  EXPECT_THAT(ended.err, AllOf(HasSubstr("lockstep: a stranger was turned away at a port of rank "),
                               HasSubstr("All have connected anew"), HasSubstr("lockstep: a stranger at 127.0.0.1:")));
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

  // What two processes say, without a launcher, with a key each, or "" for none.
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
