#include "store_client.hpp"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include "io/reason.hpp"
#include "shared_store.hpp"
#include "sockets.hpp"
#include "store_server.hpp"
#include "stored.hpp"

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;
using Bytes = StoreClient::Bytes;
using Keys = StoreClient::Keys;

constexpr milliseconds kAnswer{10'000};  // a store that takes longer counts as frozen
constexpr milliseconds kSlice{100};      // a wait is cut into these; one in which this process stood still counts once
constexpr int kConnectingTries = 10;     // a server with too many strangers may turn this client away too
constexpr milliseconds kBetweenTries{20};

[[noreturn]] void lose_store(const std::string& why) {
  C10_THROW_ERROR(DistNetworkError, "the connection to the store is lost: " + why);
}

// Gives how many bytes recv() or send() got through. Throws if `result` says that the connection is lost.
size_t progress(ssize_t result, milliseconds& waited) {
  if (result > 0) return static_cast<size_t>(result);
  if (result == 0) lose_store("it was closed");
  if (errno == EINTR) return 0;
  if (errno != EAGAIN && errno != EWOULDBLOCK) lose_store(io::reason(errno));
  waited += kSlice;
  if (waited >= kAnswer) lose_store("it does not answer");
  return 0;
}

std::string receive(int fd, size_t bytes) {
  std::string text(bytes, '\0');
  milliseconds waited{};
  for (size_t got = 0; got < bytes;) got += progress(recv(fd, text.data() + got, bytes - got, 0), waited);
  return text;
}

void send_all(int fd, const std::string& text) {
  milliseconds waited{};
  for (size_t sent = 0; sent < text.size();) {
    sent += progress(send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL), waited);
  }
}

void wait_in_slices(int fd) {
  const timeval slice{0, 1000 * kSlice.count()};
  fcntl(fd, F_SETFL, 0);  // ends O_NONBLOCK
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice);
}

void show_key(int fd, const JobKey& key) {
  const std::string greeting = receive(fd, kGreetingBytes);
  if (!greeting.starts_with(kGreeting)) lose_store("what listens there is no store of lockstep");
  const std::string theirs = greeting.substr(kGreeting.size()), mine = fresh_nonce();
  send_all(fd, mine + key.sign(signed_by("client", theirs, mine)));
  if (!key.has_signed(receive(fd, JobKey::kBytes), signed_by("server", theirs, mine))) {
    lose_store("what listens there does not know the job's key");
  }
}

std::string text_of(const Bytes& bytes) {
  return {bytes.begin(), bytes.end()};
}

Fields question_of(const std::string& what, const Keys& keys) {
  Fields question{what};
  question.insert(question.end(), keys.begin(), keys.end());
  return question;
}

}  // namespace

c10::intrusive_ptr<StoreClient> StoreClient::connect(const std::string& address, int port, const JobKey& key) {
  const auto deadline = std::chrono::steady_clock::now() + kAnswer;
  for (int tries = 1;; ++tries) {
    const int fd = connect_to(address, port, deadline);
    if (fd < 0) lose_store("nothing accepts connections there");
    send_at_once(fd);
    wait_in_slices(fd);
    auto client = c10::make_intrusive<StoreClient>(fd);
    try {
      show_key(fd, key);
      return client;
    } catch (const c10::DistNetworkError&) {
      if (tries == kConnectingTries || std::chrono::steady_clock::now() > deadline) throw;
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
}

StoreClient::StoreClient(int fd) : Store(kAnswer), fd_(fd) {}

StoreClient::StoreClient(std::unique_ptr<StoreServer> own_server)
    : Store(kAnswer), server_(std::move(own_server)), fd_(server_->own_connection()) {
  wait_in_slices(fd_);
}

StoreClient::~StoreClient() {
  if (fd_ >= 0) close(fd_);
}

Fields StoreClient::ask(const Fields& question) {
  const std::lock_guard lock(mutex_);
  if (fd_ < 0) lose_store("it has failed before");
  Fields answer;
  try {
    send_all(fd_, message_of(question));
    const size_t length = length_at_start(receive(fd_, kLengthBytes));
    if (length > kLongestMessage) lose_store("the answer makes no sense");
    answer = fields_of(receive(fd_, length));
  } catch (...) {  // the answer may still come, and would be taken for that to the next question
    close(std::exchange(fd_, -1));
    throw;
  }
  if (answer.empty() || answer[0] != "ok")
    throw Error(answer.size() == 2 ? answer[1] : "the store's answer makes no sense", {Error::machine});
  answer.erase(answer.begin());
  return answer;
}

c10::intrusive_ptr<c10d::Store> StoreClient::clone() {
  return c10::intrusive_ptr<StoreClient>::reclaim_copy(this);
}

void StoreClient::set(const std::string& key, const Bytes& value) {
  ask({"set", key, text_of(value)});
}

Bytes StoreClient::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  const std::string now = ask({"compare", key, text_of(expected), text_of(desired)}).at(0);
  return {now.begin(), now.end()};
}

Bytes StoreClient::get(const std::string& key) {
  return multiGet({key})[0];
}

int64_t StoreClient::add(const std::string& key, int64_t value) {
  return number_in(ask({"add", key, std::to_string(value)}).at(0));
}

bool StoreClient::deleteKey(const std::string& key) {
  return ask({"delete", key}).at(0) == "yes";
}

bool StoreClient::check(const Keys& keys) {
  return ask(question_of("check", keys)).at(0) == "yes";
}

int64_t StoreClient::getNumKeys() {
  return number_in(ask({"count"}).at(0));
}

void StoreClient::wait(const Keys& keys) {
  wait(keys, getTimeout());
}

void StoreClient::wait(const Keys& keys, const milliseconds& timeout) {
  wait_for_keys(*this, keys, timeout);
}

void StoreClient::append(const std::string& key, const Bytes& value) {
  ask({"append", key, text_of(value)});
}

std::vector<Bytes> StoreClient::multiGet(const Keys& keys) {
  const Fields question = question_of("get", keys);
  Fields values = ask(question);
  while (values.size() != keys.size() || std::any_of(values.begin(), values.end(), [](auto& v) { return v.empty(); })) {
    wait(keys);
    values = ask(question);
  }
  std::vector<Bytes> result;
  for (const auto& value : values) result.emplace_back(value.begin() + 1, value.end());
  return result;
}

void StoreClient::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  Fields question{"set"};
  for (size_t i = 0; i < keys.size(); ++i) question.insert(question.end(), {keys[i], text_of(values.at(i))});
  ask(question);
}

}  // namespace lockstep::comm
