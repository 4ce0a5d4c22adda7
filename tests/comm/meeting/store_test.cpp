// Labels: concurrency
// The store of a job: what it answers, and to whom.
#include "comm/meeting/store_client.hpp"

#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/meeting/job_store.hpp"
#include "comm/meeting/shared_store.hpp"
#include "comm/meeting/stored.hpp"
#include "support/error_of.hpp"
#include "support/time_limits.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace store_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<uint8_t>;

// A connection of somebody who need not keep to the protocol.
class Stranger {
 public:
  explicit Stranger(int port) : fd_(comm::connect_to("127.0.0.1", port, Clock::now() + 5s)) { EXPECT_GE(fd_, 0); }
  ~Stranger() { close(fd_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  // false: the other side is gone.
  bool say(const std::string& bytes) const {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  // `bytes` of what comes, or all until the other side hangs up.
  std::string hear(size_t bytes = 1 << 20) const {
    std::string heard;
    pollfd polled{fd_, POLLIN, 0};
    char buffer[4096];
    while (heard.size() < bytes && poll(&polled, 1, 10'000) == 1) {
      const ssize_t size = recv(fd_, buffer, std::min(sizeof buffer, bytes - heard.size()), 0);
      if (size <= 0) break;
      heard.append(buffer, static_cast<size_t>(size));
    }
    return heard;
  }

  // The server's nonce.
  std::string hear_greeting() const {
    const std::string greeting = hear(comm::kGreetingBytes);
    EXPECT_TRUE(greeting.starts_with(comm::kGreeting)) << greeting;
    return greeting.substr(comm::kGreeting.size());
  }

 private:
  const int fd_;
};

class Store : public testing::Test {
 protected:
  Store() {
    comm::StoreGuard guard{key_, [this](const std::string& text) {
                             const std::lock_guard lock(mutex_);
                             said_.push_back(text);
                           }};
    guard.patience = 400ms;
    kept_ = comm::host_store("127.0.0.1", 0, std::move(guard));
  }

  comm::StorePtr connect() const { return comm::connect_to_store("127.0.0.1", kept_.port, key_); }

  std::vector<std::string> said() {
    const std::lock_guard lock(mutex_);
    return said_;
  }

  const comm::JobKey key_ = comm::HandedKey().key();
  std::mutex mutex_;
  std::vector<std::string> said_;
  comm::KeptStore kept_;  // last, since its thread uses the others
};

Bytes bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

// Gives the answers to these questions.
std::vector<std::string> answers_of(c10d::Store& store) {
  std::vector<std::string> answers;
  const auto note = [&](const std::string& text) { answers.push_back(text); };
  const auto note_all = [&](const std::vector<Bytes>& values) {
    for (const auto& value : values) note({value.begin(), value.end()});
  };
  store.set("a", "1");
  store.set("empty", "");
  store.set("bytes", Bytes{0, 255, 10});
  note(store.get_to_str("a"));
  note(store.get_to_str("empty"));
  note_all({store.get("bytes")});
  note(std::to_string(store.add("sum", 5)));
  note(std::to_string(store.add("sum", -7)));
  note(store.get_to_str("sum"));
  note(store.compareSet("new", "", "first"));
  note(store.compareSet("new", "", "second"));
  note(store.compareSet("new", "first", "third"));
  note(store.compareSet("new", "first", "fourth"));
  note(store.compareSet("absent", "something", "else"));
  note(store.check({"absent"}) ? "there" : "not there");
  note(store.check({"a", "new"}) ? "there" : "not there");
  note(store.check({"a", "none"}) ? "there" : "not there");
  note(store.deleteKey("a") ? "deleted" : "was not there");
  note(store.deleteKey("a") ? "deleted" : "was not there");
  note(std::to_string(store.getNumKeys()));
  store.append("new", bytes(", more"));
  store.append("begun", bytes("so"));
  store.multiSet({"m1", "m2"}, {bytes("x"), bytes("y")});
  note_all(store.multiGet({"new", "begun", "m2", "m1"}));
  return answers;
}

TEST_F(Store, AnswersAsC10dsDo) {
  const auto theirs = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(answers_of(*connect()), answers_of(*theirs));
}

TEST_F(Store, IsOneForAll) {
  kept_.store->set("key", "value");
  EXPECT_EQ(connect()->get_to_str("key"), "value");
  const std::string large(3'000'000, 'x');
  connect()->set("large", large);
  EXPECT_EQ(kept_.store->get_to_str("large"), large);
}

TEST_F(Store, AWaitEndsWhenTheKeyComesOrAtItsDeadlineOrOnRequest) {
  const auto store = connect();
  std::thread other([&] {
    std::this_thread::sleep_for(50ms);
    connect()->set("late", "1");
  });
  EXPECT_EQ(store->get_to_str("late"), "1");
  other.join();
  EXPECT_THAT(any_error_of([&] { store->wait({"never"}, 20ms); }), HasSubstr("did not come into the store within"));
  std::stop_source stop;
  stop.request_stop();
  EXPECT_THAT(any_error_of([&] { comm::wait_for_keys(*store, {"never"}, 10s, stop.get_token()); }),
              HasSubstr("called off"));
}

TEST_F(Store, AddingToWhatIsNoNumberIsToldAndHarmsNobody) {
  const auto store = connect();
  store->set("text", "abc");
  EXPECT_THAT(error_of([&] { store->add("text", 1); }), Fails(Error::machine));
  EXPECT_EQ(store->get_to_str("text"), "abc");
}

TEST_F(Store, ThatIsGoneIsAnErrorOfLibTorchsKind) {
  const auto store = connect();
  kept_ = {};
  EXPECT_THROW(store->check({"key"}), c10::DistError);
  EXPECT_THROW(store->check({"key"}), c10::DistError);
  EXPECT_THROW(connect(), c10::DistError);
}

TEST_F(Store, WhoDoesNotKnowTheKeyGetsNoAnswer) {
  const auto other = comm::HandedKey().key();
  EXPECT_THAT(any_error_of([&] { comm::connect_to_store("127.0.0.1", kept_.port, other); }), HasSubstr("is lost"));
  EXPECT_THAT(said().at(0), AllOf(HasSubstr("a stranger at 127.0.0.1:"), HasSubstr("does not know the job's key")));
}

TEST_F(Store, StrangersHearNothingButAGreeting) {
  std::string proof;  // proof of one who knows the key
  {
    const Stranger friendly(kept_.port);
    const std::string theirs = friendly.hear_greeting(), mine = comm::fresh_nonce();
    proof = mine + key_.sign(comm::signed_by("client", theirs, mine));
    ASSERT_TRUE(friendly.say(proof + comm::message_of({"set", "from a friend", "1"})));
    const std::string answer = friendly.hear(comm::JobKey::kBytes);
    EXPECT_TRUE(key_.has_signed(answer, comm::signed_by("server", theirs, mine)));
    EXPECT_THAT(friendly.hear(comm::message_of({"ok"}).size()), comm::message_of({"ok"}));
  }
  EXPECT_THAT(said(), SizeIs(0));
  const auto is_turned_away = [&](const char* why, const std::function<void(const Stranger&)>& says) {
    const size_t before = said().size();
    const Stranger stranger(kept_.port);
    stranger.hear_greeting();
    says(stranger);
    EXPECT_EQ(stranger.hear(), "") << why;
    const auto deadline = Clock::now() + 5s;
    while (said().size() == before && Clock::now() < deadline) std::this_thread::sleep_for(1ms);
    EXPECT_THAT(said().back(), HasSubstr(why));
  };
  const std::string set = comm::message_of({"set", "from a stranger", "1"});
  is_turned_away("does not know the job's key", [&](auto& stranger) { stranger.say(proof + set); });  // replayed
  is_turned_away("does not know the job's key", [&](auto& stranger) { stranger.say(std::string(100'000, 'g')); });
  is_turned_away("did not show the job's key within 0.4 s", [](auto&) {});
  is_turned_away("did not show the job's key within 0.4 s", [&](auto& stranger) {
    for (const char byte : proof + set) {
      if (!stranger.say({byte})) break;
      std::this_thread::sleep_for(20ms);
    }
  });
  EXPECT_TRUE(kept_.store->check({"from a friend"}));
  EXPECT_FALSE(kept_.store->check({"from a stranger"}));
}

// Neither can take the other's words for its own, nor is a client deceived by a server that does not know the key.
TEST_F(Store, WhatListensInItsPlaceDeceivesNobody) {
  const auto listener = comm::listen_on("127.0.0.1", 0);
  std::thread impostor([&] {
    for (int fd = -1; (fd = accept(listener.fd, nullptr, nullptr)) >= 0; close(fd)) {
      const std::string nonce(comm::JobKey::kBytes, 'n'), greeting = comm::kGreeting + nonce;
      std::string proof(comm::kProofBytes, '\0');
      send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL);
      recv(fd, proof.data(), proof.size(), MSG_WAITALL);
      send(fd, proof.data() + comm::JobKey::kBytes, comm::JobKey::kBytes, MSG_NOSIGNAL);  // the client's own
    }
  });
  EXPECT_THAT(any_error_of([&] { comm::connect_to_store("127.0.0.1", listener.port, key_); }),
              HasSubstr("what listens there does not know the job's key"));
  shutdown(listener.fd, SHUT_RDWR);
  impostor.join();
  close(listener.fd);
}

TEST_F(Store, ManyStrangersKeepNobodyOut) {
  const auto early = connect();
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(std::make_unique<Stranger>(kept_.port));
  const auto start = Clock::now();
  early->set("key", "value");
  EXPECT_EQ(connect()->get_to_str("key"), "value");
  EXPECT_LT(Clock::now() - start, kSlowdown * 2s);
  EXPECT_THAT(said().at(0), HasSubstr("there were too many of them"));
  EXPECT_LT(said().size(), 10u);  // the first five, the tenth, the hundredth …
}

TEST_F(Store, AMessageThatIsTooLongEndsItsConnectionAlone) {
  const Stranger friendly(kept_.port);
  const std::string theirs = friendly.hear_greeting(), mine = comm::fresh_nonce();
  friendly.say(mine + key_.sign(comm::signed_by("client", theirs, mine)));
  friendly.hear(comm::JobKey::kBytes);
  friendly.say("\xff\xff\xff\xff");
  EXPECT_EQ(friendly.hear(), "");
  EXPECT_FALSE(kept_.store->check({"key"}));
}

}  // namespace store_test
