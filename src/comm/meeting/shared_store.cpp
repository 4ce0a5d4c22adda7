#include "shared_store.hpp"

#include <c10/util/Exception.h>

#include "base/seconds.hpp"
#include "wait_limit.hpp"

#include <thread>
#include <utility>

namespace lockstep::comm {

using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLongestPauseOfKeys{16};

}  // namespace

void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, milliseconds timeout,
                   const std::stop_token& stop) {
  const auto begin = std::chrono::steady_clock::now();
  while (!store.check(keys)) {
    if (stop.stop_requested()) C10_THROW_ERROR(DistStoreError, "a wait for keys of the store was called off");
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited >= timeout) {
      C10_THROW_ERROR(DistStoreError, "keys did not come into the store within " + seconds(timeout));
    }
    std::this_thread::sleep_for(pause_after(waited, kLongestPauseOfKeys));
  }
}

SharedStore::SharedStore(std::string prefix, c10::intrusive_ptr<c10d::Store> connection, std::stop_token stop)
    : PrefixStore(std::move(prefix), std::move(connection)), stop_(std::move(stop)) {}

c10::intrusive_ptr<c10d::Store> SharedStore::clone() {
  return c10::make_intrusive<SharedStore>(prefix_, store_, stop_);
}

SharedStore::Bytes SharedStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

void SharedStore::wait(const Keys& keys) {
  wait(keys, getTimeout());
}

void SharedStore::wait(const Keys& keys, const milliseconds& timeout) {
  wait_for_keys(*this, keys, timeout, stop_);
}

std::vector<SharedStore::Bytes> SharedStore::multiGet(const Keys& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

}  // namespace lockstep::comm
