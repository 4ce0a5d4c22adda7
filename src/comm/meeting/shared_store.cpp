#include "shared_store.hpp"

#include <c10/util/Exception.h>

#include "base/seconds.hpp"
#include "wait_limit.hpp"

#include <chrono>
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

SharedStore::SharedStore(std::shared_ptr<Connection> connection, std::stop_token stop)
    : connection_(std::move(connection)), stop_(std::move(stop)) {}

c10::intrusive_ptr<c10d::Store> SharedStore::clone() {
  return c10::make_intrusive<SharedStore>(connection_, stop_);
}

void SharedStore::set(const std::string& key, const Bytes& value) {
  const std::lock_guard lock(connection_->mutex);
  connection_->store->set(key, value);
}

SharedStore::Bytes SharedStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  const std::lock_guard lock(connection_->mutex);
  return connection_->store->compareSet(key, expected, desired);
}

SharedStore::Bytes SharedStore::get(const std::string& key) {
  wait({key});
  const std::lock_guard lock(connection_->mutex);
  return connection_->store->get(key);
}

int64_t SharedStore::add(const std::string& key, int64_t value) {
  const std::lock_guard lock(connection_->mutex);
  return connection_->store->add(key, value);
}

bool SharedStore::deleteKey(const std::string& key) {
  const std::lock_guard lock(connection_->mutex);
  return connection_->store->deleteKey(key);
}

bool SharedStore::check(const Keys& keys) {
  const std::lock_guard lock(connection_->mutex);
  return connection_->store->check(keys);
}

int64_t SharedStore::getNumKeys() {
  const std::lock_guard lock(connection_->mutex);
  return connection_->store->getNumKeys();
}

void SharedStore::wait(const Keys& keys) {
  wait(keys, getTimeout());
}

void SharedStore::wait(const Keys& keys, const milliseconds& timeout) {
  wait_for_keys(*this, keys, timeout, stop_);
}

void SharedStore::append(const std::string& key, const Bytes& value) {
  const std::lock_guard lock(connection_->mutex);
  connection_->store->append(key, value);
}

std::vector<SharedStore::Bytes> SharedStore::multiGet(const Keys& keys) {
  wait(keys);
  const std::lock_guard lock(connection_->mutex);
  return connection_->store->multiGet(keys);
}

void SharedStore::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  const std::lock_guard lock(connection_->mutex);
  connection_->store->multiSet(keys, values);
}

bool SharedStore::hasExtendedApi() const {
  return connection_->store->hasExtendedApi();
}

}  // namespace lockstep::comm
