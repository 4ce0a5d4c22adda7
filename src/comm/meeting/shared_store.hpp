// A SharedStore has some of a store's keys, on a connection that several threads share, and waits that can be called
// off.
//
// A wait asks again and again, so it does not keep other threads from the connection. Once `stop` is requested, a wait
// throws DistStoreError, as at its deadline. One connection serves all groups, since c10d asks the name service for
// each new one, which may take seconds. All calls are thread-safe, as the store's are.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chrono>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep::comm {

// Asks again and again until all keys are there, less often the longer it takes (wait_limit.hpp). Throws DistStoreError
// at the deadline, or once a stop was requested.
void wait_for_keys(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds timeout,
                   const std::stop_token& stop = {});

class SharedStore : public c10d::PrefixStore {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;

  SharedStore(std::string prefix, c10::intrusive_ptr<c10d::Store> connection, std::stop_token stop = {});

  c10::intrusive_ptr<Store> clone() override;
  Bytes get(const std::string& key) override;
  void wait(const Keys& keys) override;
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<Bytes> multiGet(const Keys& keys) override;
  const std::chrono::milliseconds& getTimeout() const noexcept override { return timeout_; }  // not the connection's
  void setTimeout(const std::chrono::milliseconds& timeout) override { timeout_ = timeout; }

 private:
  const std::stop_token stop_;
};

}  // namespace lockstep::comm
