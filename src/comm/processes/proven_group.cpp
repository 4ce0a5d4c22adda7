#include "proven_group.hpp"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/exception_text.hpp"
#include "base/libtorch_log.hpp"
#include "comm/meeting/attempt.hpp"
#include "comm/meeting/wait_limit.hpp"
#include "guests.hpp"
#include "io/reason.hpp"
#include "keys_of_members.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace lockstep::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kTries = 4;
constexpr milliseconds kShortestProof{3'000};  // others may still be connecting
constexpr int kNonceTag = 0x7ffd << 16, kProofTag = 0x7ffe << 16;
const std::string kVoid = "void", kProven = "proven";

struct NotProven : std::runtime_error {
  using runtime_error::runtime_error;
};

at::Tensor to_tensor(const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string to_text(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

// A Proof goes over one of the connections between each two members.
class Proof {
 public:
  Proof(const ProvenPlace& place, int number, c10d::Backend& backend, int connection)
      : place_(place), number_(number), backend_(backend), connection_(connection) {}

  // Throws NotProven.
  void exchange() {
    const std::string mine = fresh_nonce();
    const auto theirs = swap(kNonceTag, [&](int) { return mine; });
    const auto proofs =
        swap(kProofTag, [&](int peer) { return place_.key.sign(signed_by(rank(), peer, mine, theirs[peer])); });
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank() || place_.key.has_signed(proofs[peer], signed_by(peer, rank(), theirs[peer], mine))) continue;
      throw NotProven("a stranger was turned away at the port of " + name(rank()) + ", where it had the place of " +
                      name(peer) + ": it does not know the job's key");
    }
  }

 private:
  int rank() const { return place_.group.rank; }
  int size() const { return place_.group.size; }
  const std::string& name(int member) const { return place_.members.at(member); }

  std::vector<std::string> signed_by(int from, int to, const std::string& its_nonce, const std::string& the_others) {
    return {"lockstep group",
            place_.name,
            std::to_string(number_),
            std::to_string(connection_),
            std::to_string(from),
            std::to_string(to),
            its_nonce,
            the_others};
  }

  // Sends a text of 32 bytes to each other member, and gives the text that came from each.
  template <class TextFor>
  std::vector<std::string> swap(int tag, const TextFor& text_for) {
    const auto deadline = Clock::now() + std::max(place_.silence, kShortestProof);
    std::vector<std::vector<at::Tensor>> in(size()), out(size());
    std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>> works;
    std::vector<std::string> texts(size());
    int current = 0;
    try {
      for (current = 0; current < size(); ++current) {
        if (current == rank()) continue;
        in[current] = {at::empty({static_cast<int64_t>(JobKey::kBytes)}, at::kByte)};
        out[current] = {to_tensor(text_for(current))};
        works.emplace_back(current, backend_.recv(in[current], current, tag + connection_));
        works.emplace_back(current, backend_.send(out[current], current, tag + connection_));
      }
      for (const auto& [peer, work] : works) {
        current = peer;
        const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
        work->wait(std::max(left, milliseconds(1)));
      }
    } catch (const std::exception&) {
      const std::string neither = ": neither saw a proof that the other knows the job's key";
      if (Clock::now() < deadline) {
        throw NotProven("the connection of " + name(rank()) + " and " + name(current) +
                        " was closed, since one of them failed or a stranger had its place" + neither);
      }
      throw NotProven("a stranger was turned away at a port of " + name(rank()) + " or " + name(current) +
                      ", or one of them stood still" + neither);
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) texts[peer] = to_text(in[peer][0]);
    }
    return texts;
  }

  const ProvenPlace& place_;
  const int number_;
  c10d::Backend& backend_;
  const int connection_;
};

// A Try is one try to connect all members.
class Try {
 public:
  Try(const ProvenPlace& place, int number) : place_(place), number_(number) {
    place_.group.store =
        c10::make_intrusive<c10d::PrefixStore>("try-" + std::to_string(number), std::move(place_.group.store));
    place_.group.guarded = true;
    place_.group.hushed = number > 1;
  }

  // Gives nothing if a member finds a stranger in another one's place, or cannot connect.
  std::optional<GroupMember> connect(const std::stop_token& stop) {
    const auto attempt = Attempt::start([one = *this](const std::stop_token&) { return one.connect_and_prove(); });
    std::optional<GroupMember> group;
    try {
      group = wait_for_all(*attempt, stop);
    } catch (const Error& error) {
      throw Error(place_.members.at(place_.group.rank) + ": connecting to the other ranks failed: " + error.what(),
                  {Error::machine});
    } catch (const c10::DistError&) {  // the store threw it
      attempt->call_off();
      throw;
    } catch (const NotProven& error) {
      say_that_it_is_void(error.what());
    } catch (const std::exception&) {  // Gloo threw it
      const std::string why = exception_text(std::current_exception());
      refuse_if_files_are_lacking(why);
      say_that_it_is_void(place_.members.at(place_.group.rank) + " could not connect: " + why);
    }
    if (!group) attempt->call_off();
    return group;
  }

  std::string why_void() const { return store().get_to_str(kVoid); }

 private:
  c10d::Store& store() const { return *place_.group.store; }

  GroupMember connect_and_prove() const {
    auto group = make_gloo_group(place_.group, place_.local_address);
    for (int connection = 0; connection < group.connections; ++connection) {
      Proof(place_, number_, *group.backend, connection).exchange();
    }
    store().set(key_of_member(kProven, place_.group.rank), std::string("yes"));
    return group;
  }

  // A member that has proven itself never says that the try is void. So the try is valid once all members have proven
  // themselves.
  std::optional<GroupMember> wait_for_all(Attempt& attempt, const std::stop_token& stop) const {
    const auto begin = Clock::now();
    const microseconds longest(place_.group.hushed ? 1'000 : 16'000);
    Guests guests(place_.group.store, place_.group.rank, place_.group.size);
    std::optional<GroupMember> group;
    for (;;) {
      const auto pause = pause_after(Clock::now() - begin, longest);
      if (place_.group.hushed) guests.look();
      if (group) {
        std::this_thread::sleep_for(pause);
      } else {
        group = attempt.wait(pause);
      }
      if (group && store().check(keys_of_members(kProven, place_.group.size))) {
        if (group->shut) group->shut();
        for (const auto& address : guests.turn_strangers_away()) {
          warn_as_libtorch("lockstep: a stranger at " + address + " was turned away at the port of " +
                           place_.members.at(place_.group.rank));
        }
        return group;
      }
      if (store().check({kVoid})) {
        if (group) group->close();
        return std::nullopt;
      }
      if (stop.stop_requested()) C10_THROW_ERROR(DistStoreError, "connecting was called off");
    }
  }

  // Throws if files are lacking: another try would fail too, and no stranger is to blame.
  void refuse_if_files_are_lacking(const std::string& why) const {
    const std::string too_many = io::reason(EMFILE);
    const int probe = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (probe >= 0) close(probe);
    if (probe >= 0 && why.find(too_many) == std::string::npos) return;
    throw Error(place_.members.at(place_.group.rank) + ": connecting to the other ranks failed: " + too_many +
                    ". Raise the limit of this process (ulimit -n)",
                {Error::machine});
  }

  void say_that_it_is_void(const std::string& why) const { store().compareSet(kVoid, std::string(), why); }

  ProvenPlace place_;
  int number_;
};

}  // namespace

GroupMember make_proven_group(const ProvenPlace& place, const std::stop_token& stop) {
  std::vector<std::string> turned_away;
  for (int number = 1; number <= kTries; ++number) {
    Try one(place, number);
    if (auto group = one.connect(stop)) {
      if (place.group.rank != 0) return *std::move(group);  // only one member warns
      for (const auto& why : turned_away) warn_as_libtorch("lockstep: " + why + ". All have connected anew");
      return *std::move(group);
    }
    turned_away.push_back(one.why_void());
  }
  throw Error(place.members.at(place.group.rank) + ": the members of " + place.name + " could not connect in " +
                  std::to_string(kTries) + " tries. At the last one: " + turned_away.back() +
                  ". If that is not a member's own fault, keep strangers off the ports of these machines",
              {Error::machine});
}

}  // namespace lockstep::comm
