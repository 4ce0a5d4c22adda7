#include "store_server.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include "base/seconds.hpp"
#include "base/start_thread.hpp"
#include "io/libcrypto.hpp"
#include "io/reason.hpp"
#include "store_messages.hpp"
#include "stored.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <iterator>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostStrangers = 64;
constexpr int kAcceptedAtOnce = 32;  // the peers are served after so many
constexpr size_t kReadAtOnce = 64 << 10;
constexpr auto kUntilNextTry = std::chrono::milliseconds(100);  // if there are no more descriptors

struct Peer {
  int fd;
  std::string address;  // the address, for texts
  bool is_known = false;
  Clock::time_point came = Clock::now();
  std::string nonce = {};         // the nonce that it was sent
  std::string in = {}, out = {};  // bytes not yet taken, bytes not yet sent
  bool is_gone = false;
};

// Tells of the first strangers, and then of fewer and fewer.
class Strangers {
 public:
  explicit Strangers(std::function<void(const std::string&)> say) : say_(std::move(say)) {}

  void turned_away(const std::string& address, const std::string& why) {
    constexpr int64_t told_one_by_one = 5;
    ++count_;
    if (count_ > told_one_by_one && count_ != next_) return;
    while (next_ <= count_) next_ *= 10;
    say_("a stranger at " + address + " was turned away from the job's store: " + why +
         (count_ > told_one_by_one ? "; it is number " + std::to_string(count_) : ""));
  }

 private:
  const std::function<void(const std::string&)> say_;
  int64_t count_ = 0, next_ = 10;
};

// StoredValues are what a job's store holds, and its answers to questions. Keys and values are bytes. Use them from one
// thread at a time.
//
//   set KEY VALUE ...           ->
//   get KEY ...                 -> for each "=" and its value, or ""
//   check KEY ...               -> "yes" if all are there, or "no"
//   add KEY NUMBER              -> the sum, which is a decimal text
//   compare KEY BEFORE AFTER    -> what is there now: AFTER if it was BEFORE, or was not there and BEFORE is empty
//   append KEY VALUE            ->
//   delete KEY                  -> "yes" if it was there, or "no"
//   count                       -> the number of keys
class StoredValues {
 public:
  // Gives "ok" and the answer, or "no" and why not.
  Fields answer(const Fields& question) {
    try {
      check_question(!question.empty());
      Fields answer = answer_of(question[0], question);
      answer.insert(answer.begin(), "ok");
      return answer;
    } catch (const std::exception& error) {
      return {"no", error.what()};
    }
  }

 private:
  static void check_question(bool is_right) {
    if (!is_right) throw Error("the store does not know this question");
  }

  Fields answer_of(const std::string& what, const Fields& question) {
    const size_t count = question.size();
    Fields answer;
    if (what == "set") {
      check_question(count % 2 == 1);
      for (size_t i = 1; i < count; i += 2) values_[question[i]] = question[i + 1];
    } else if (what == "get") {
      for (size_t i = 1; i < count; ++i) {
        const auto found = values_.find(question[i]);
        answer.push_back(found == values_.end() ? "" : "=" + found->second);
      }
    } else if (what == "check") {
      const bool all =
          std::all_of(question.begin() + 1, question.end(), [&](auto& key) { return values_.contains(key); });
      answer.emplace_back(all ? "yes" : "no");
    } else if (what == "add") {
      check_question(count == 3);
      answer.push_back(add(question[1], question[2]));
    } else if (what == "compare") {
      check_question(count == 4);
      answer.push_back(compare(question[1], question[2], question[3]));
    } else if (what == "append") {
      check_question(count == 3);
      values_[question[1]] += question[2];
    } else if (what == "delete") {
      check_question(count == 2);
      answer.emplace_back(values_.erase(question[1]) > 0 ? "yes" : "no");
    } else {
      check_question(what == "count");
      answer.push_back(std::to_string(values_.size()));
    }
    return answer;
  }

  std::string add(const std::string& key, const std::string& number) {
    const auto found = values_.find(key);
    const int64_t before = found == values_.end() ? 0 : parse_stored(key, found->second, number_in);
    return values_[key] = std::to_string(before + number_in(number));
  }

  std::string compare(const std::string& key, const std::string& before, const std::string& after) {
    const auto found = values_.find(key);
    if (found == values_.end() && !before.empty()) return before;
    if (found != values_.end() && found->second != before) return found->second;
    return values_[key] = after;
  }

  std::unordered_map<std::string, std::string> values_;
};

// A Service does the work of the server's thread.
class Service {
 public:
  Service(int listener, int stop, int own_end, StoreGuard guard)
      : listener_(listener), stop_(stop), guard_(std::move(guard)), strangers_(guard_.say) {
    peers_.push_back({.fd = own_end, .address = "this process", .is_known = true});
  }
  ~Service() {
    for (const auto& peer : peers_) close(peer.fd);
    close(listener_);
  }
  Service& operator=(Service&&) = delete;

  void run() {
    while (look()) {
      for (auto& peer : peers_) {
        if (!peer.is_known && Clock::now() - peer.came > guard_.patience) {
          turn_away(peer, "it did not show the job's key within " + seconds(guard_.patience));
        }
      }
      forget_the_gone();
    }
  }

 private:
  // Waits until there is something to do, and does it. Gives false if the server is to end.
  bool look() {
    const bool has_rest = Clock::now() < accepts_from_;
    std::vector<pollfd> polled = {{stop_, POLLIN, 0}, {has_rest ? -1 : listener_, POLLIN, 0}};
    for (const auto& peer : peers_) {
      polled.push_back({peer.fd, static_cast<short>(peer.out.empty() ? POLLIN : POLLOUT), 0});
    }
    if (poll(polled.data(), polled.size(), time_to_wait()) <= 0) return true;
    if (polled[0].revents != 0) return false;
    auto of_peer = polled.begin() + 2;
    for (auto& peer : peers_) {
      if ((of_peer++)->revents != 0) serve(peer);
    }
    if (polled[1].revents != 0) accept_some();
    return true;
  }

  int time_to_wait() const {
    constexpr int forever = -1, soon = 100;
    const bool has_strangers = std::any_of(peers_.begin(), peers_.end(), [](auto& peer) { return !peer.is_known; });
    return has_strangers || Clock::now() < accepts_from_ ? soon : forever;
  }

  void accept_some() {
    for (int i = 0; i < kAcceptedAtOnce; ++i) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd >= 0) {
        greet(fd);
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        lack_descriptors(errno);
        return;
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      }
    }
  }

  void greet(int fd) {
    send_at_once(fd);
    const auto strangers = std::count_if(peers_.begin(), peers_.end(), [](auto& peer) { return !peer.is_known; });
    if (static_cast<size_t>(strangers) >= kMostStrangers) {
      turn_away(*oldest_unproven(), "there were too many of them");
      forget_the_gone();
    }
    Peer& peer = peers_.emplace_back(Peer{.fd = fd, .address = peer_address(fd)});
    peer.nonce = fresh_nonce();
    peer.out = kGreeting + peer.nonce;
    send_rest(peer);
  }

  std::list<Peer>::iterator oldest_unproven() {
    return std::find_if(peers_.begin(), peers_.end(), [](auto& peer) { return !peer.is_known; });
  }

  // The peer that has to go may belong to the job, so it is not called a stranger.
  void lack_descriptors(int error) {
    if (!std::exchange(has_told_of_lack_, true)) {
      guard_.say("the job's store takes no more connections: " + io::reason(error) +
                 ". Raise the limit of open files of this process (ulimit -n)");
    }
    if (const auto oldest = oldest_unproven(); oldest != peers_.end()) {
      oldest->is_gone = true;
      forget_the_gone();
    } else {
      accepts_from_ = Clock::now() + kUntilNextTry;
    }
  }

  void turn_away(Peer& peer, const std::string& why) {
    if (std::exchange(peer.is_gone, true)) return;
    strangers_.turned_away(peer.address, why);
  }

  // A peer that goes without a word only looked whether somebody listens.
  void lose(Peer& peer) {
    if (!peer.is_known && !peer.in.empty()) return turn_away(peer, "it went away before it had shown the job's key");
    peer.is_gone = true;
  }

  void forget_the_gone() {
    for (auto peer = peers_.begin(); peer != peers_.end();) {
      if (peer->is_gone) close(peer->fd);
      peer = peer->is_gone ? peers_.erase(peer) : std::next(peer);
    }
  }

  void serve(Peer& peer) {
    if (!peer.out.empty()) send_rest(peer);
    if (peer.is_gone || !peer.out.empty()) return;
    const size_t most = peer.is_known ? kReadAtOnce : kProofBytes - peer.in.size();
    const size_t before = peer.in.size();
    peer.in.resize(before + most);
    const ssize_t size = recv(peer.fd, peer.in.data() + before, most, MSG_DONTWAIT);
    const int error = errno;
    peer.in.resize(before + static_cast<size_t>(std::max<ssize_t>(size, 0)));
    if (size == 0 || (size < 0 && error != EAGAIN && error != EWOULDBLOCK && error != EINTR)) return lose(peer);
    if (!peer.is_known && peer.in.size() == kProofBytes) check_proof(peer);
    if (peer.is_known) answer(peer);
  }

  void check_proof(Peer& peer) {
    const std::string nonce = peer.in.substr(0, JobKey::kBytes), signature = peer.in.substr(JobKey::kBytes);
    peer.in.clear();
    if (!guard_.key.has_signed(signature, signed_by("client", peer.nonce, nonce))) {
      return turn_away(peer, "it does not know the job's key");
    }
    peer.is_known = true;
    peer.out = guard_.key.sign(signed_by("server", peer.nonce, nonce));
    send_rest(peer);
  }

  void answer(Peer& peer) {
    size_t taken = 0;
    while (peer.out.empty() && peer.in.size() - taken >= kLengthBytes) {
      const std::string_view rest = std::string_view(peer.in).substr(taken);
      const size_t length = length_at_start(rest);
      if (length > kLongestMessage) return lose(peer);
      if (rest.size() < kLengthBytes + length) break;
      peer.out = message_of(values_.answer(fields_of(rest.substr(kLengthBytes, length))));
      taken += kLengthBytes + length;
      send_rest(peer);
    }
    peer.in.erase(0, taken);
  }

  void send_rest(Peer& peer) {
    const ssize_t size = send(peer.fd, peer.out.data(), peer.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (size >= 0) {
      peer.out.erase(0, static_cast<size_t>(size));
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      lose(peer);
    }
  }

  const int listener_, stop_;
  const StoreGuard guard_;
  Strangers strangers_;
  StoredValues values_;
  std::list<Peer> peers_;  // peers in the order in which they came
  Clock::time_point accepts_from_ = Clock::now();
  bool has_told_of_lack_ = false;
};

}  // namespace

StoreServer::StoreServer(const Listener& listener, StoreGuard guard) {
  io::libcrypto();  // finds out here that libcrypto is missing, since the thread could tell nobody
  int ends[2] = {-1, -1};
  stop_ = eventfd(0, EFD_CLOEXEC);
  if (stop_ < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0 ||
      fcntl(listener.fd, F_SETFL, O_NONBLOCK) != 0) {
    throw Error("cannot keep a store: " + io::reason(errno), {Error::machine});
  }
  own_end_ = ends[0];
  auto service = std::make_unique<Service>(listener.fd, stop_, ends[1], std::move(guard));
  thread_ = start_thread([service = std::move(service)] { service->run(); });
}

StoreServer::~StoreServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_, &one, sizeof one);
  thread_.join();
  close(stop_);
}

}  // namespace lockstep::comm
