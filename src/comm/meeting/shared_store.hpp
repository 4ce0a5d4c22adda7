// SharedStore: one connection to the store for several threads, whose waits can be called off.
//
// A wait asks again and again, so it does not keep other threads from the connection. Once `stop` is requested, a wait
// throws DistStoreError, as at its deadline. One connection serves all groups, since c10d asks the name service for
// each new one, which may take seconds. Thread-safe.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep::comm {

// Asks again and again until all keys are there, less often the longer it takes (wait_limit.hpp). Throws DistStoreError
// at the deadline, or once a stop was requested.
void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds timeout,
                   const std::stop_token& stop = {});

class SharedStore : public c10d::Store {
 public:
  struct Connection {
    explicit Connection(c10::intrusive_ptr<c10d::Store> store) : store(std::move(store)) {}
    std::mutex mutex;  // guards what follows
    const c10::intrusive_ptr<c10d::Store> store;
  };
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;

  explicit SharedStore(std::shared_ptr<Connection> connection, std::stop_token stop = {});

  c10::intrusive_ptr<Store> clone() override;
  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const Keys& keys) override;
  int64_t getNumKeys() override;
  void wait(const Keys& keys) override;
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const Keys& keys) override;
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override;

 private:
  const std::shared_ptr<Connection> connection_;
  const std::stop_token stop_;
};

}  // namespace lockstep::comm
