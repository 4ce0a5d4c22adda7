#include "tcp_store.hpp"

#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "alarm.hpp"
#include "sockets.hpp"

namespace lockstep::comm {
namespace {

constexpr auto kAnswer = std::chrono::seconds(10);  // a store that takes longer is taken for frozen
constexpr auto kConnecting = kAnswer * 2 / 5;       // c10d tries for up to 2.5 times its timeout

KeptStore keep_store(const std::string& address, const Listener& listener) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(listener.port);
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = kConnecting;  // of the host's own connection, too: a launcher that waits in it hears no signal
  options.masterListenFd = listener.fd;
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(address, options);
    store->setTimeout(kAnswer);
    return {store, store->getPort()};
  } catch (const c10::Error& error) {
    throw Error("cannot keep a store at " + store_place(address, listener.port) + ": " +
                error.what_without_backtrace());
  }
}

}  // namespace

std::string store_place(const std::string& address, int port) {
  return (address.find(':') == std::string::npos ? address : "[" + address + "]") + ":" + std::to_string(port);
}

KeptStore host_store(const std::string& address, int port) {
  return keep_store(address, listen_on(address, port));
}

KeptStore host_store_everywhere(const std::string& address, int port) {
  return keep_store(address, listen_everywhere(port));
}

StorePtr connect_to_store(const std::string& address, int port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.timeout = kConnecting;
  const Alarm alarm(kAnswer, [&] { hang_up(address, port); });
  auto store = c10::make_intrusive<c10d::TCPStore>(address, options);
  store->setTimeout(kAnswer);
  limit_silence(address, port, kAnswer);  // c10d itself waits for an answer without end
  return store;
}

bool store_answers(const std::string& address, int port, std::chrono::steady_clock::time_point deadline) {
  return answers(address, port, deadline);
}

}  // namespace lockstep::comm
