// A StoreClient is a connection to a job's store as c10d knows stores (store_server.hpp has the other end).
//
// A question takes one message and its answer. A wait asks again and again, so that other threads get to the store
// meanwhile. A store that does not answer for ten seconds counts as gone, but time in which this process stood still
// does not count. A connection that failed once stays so. All calls are thread-safe.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "store_messages.hpp"

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::comm {

class StoreServer;

class StoreClient : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;

  // Connects, and shows the key. Throws DistNetworkError if nothing listens there, if it does not answer, or if one of
  // the two does not know the other's key.
  static c10::intrusive_ptr<StoreClient> connect(const std::string& address, int port, const JobKey& key);

  explicit StoreClient(int fd);                                   // `fd` has shown the key already
  explicit StoreClient(std::unique_ptr<StoreServer> own_server);  // keeps the server
  ~StoreClient() override;
  StoreClient& operator=(StoreClient&&) = delete;

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
  bool hasExtendedApi() const override { return true; }

 private:
  Fields ask(const Fields& question);

  std::unique_ptr<StoreServer> server_;
  std::mutex mutex_;  // guards what follows
  int fd_;            // -1: the connection has failed
};

}  // namespace lockstep::comm
