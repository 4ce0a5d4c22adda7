#include "job_store.hpp"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/start_thread.hpp"
#include "sockets.hpp"
#include "store_client.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

namespace lockstep::comm {
namespace {

constexpr auto kAnswerOfTcpStore = std::chrono::seconds(10);  // a store that takes longer counts as frozen
constexpr auto kConnectingToIt = kAnswerOfTcpStore * 2 / 5;   // c10d tries for up to 2.5 times its timeout

KeptStore keep_store(const Listener& listener, StoreGuard guard) {
  auto server = std::make_unique<StoreServer>(listener, std::move(guard));
  return {c10::make_intrusive<StoreClient>(std::move(server)), listener.port};
}

}  // namespace

KeptStore host_store(const std::string& address, int port, StoreGuard guard) {
  return keep_store(listen_on(address, port), std::move(guard));
}

KeptStore host_store_everywhere(int port, StoreGuard guard) {
  return keep_store(listen_everywhere(port), std::move(guard));
}

StorePtr connect_to_store(const std::string& address, int port, const JobKey& key) {
  return StoreClient::connect(address, port, key);
}

StorePtr connect_to_tcp_store(const std::string& address, int port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.timeout = kConnectingToIt;
  const auto alarm = start_thread<std::jthread>(
      [&](const std::stop_token& connected) {  // the constructor below has no deadline of its own
        std::mutex mutex;
        std::unique_lock lock(mutex);
        std::condition_variable_any().wait_for(lock, connected, kAnswerOfTcpStore, [] { return false; });
        if (!connected.stop_requested()) hang_up(address, port);
      });
  auto store = c10::make_intrusive<c10d::TCPStore>(address, options);
  store->setTimeout(kAnswerOfTcpStore);
  limit_silence(address, port, kAnswerOfTcpStore);  // c10d itself waits for an answer without end
  return store;
}

bool answers(const std::string& address, int port, std::chrono::steady_clock::time_point deadline) {
  const int fd = connect_to(address, port, deadline);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

}  // namespace lockstep::comm
