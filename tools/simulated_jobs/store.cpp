// The store of a simulation, in the place of src/comm/meeting/job_store.cpp: a map in the process that keeps it. Each
// question travels there and its answer back.
#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include "comm/meeting/job_store.hpp"
#include "network.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace lockstep::simulation {
namespace {

using Bytes = Network::Bytes;
using Keys = std::vector<std::string>;

constexpr Time kAnswer = 10 * kSecond;  // store_client.cpp has the same

Process& this_process() {
  return *Scheduler::this_thread()->process;
}

// A connection serves one thread at a time, also while it waits, as with torchrun's TCPStore.
class StoreClient : public c10d::Store {
 public:
  explicit StoreClient(std::shared_ptr<Network::Host> host) : host_(std::move(host)), owner_(this_process()) {
    ++owner_.connections;
    setTimeout(std::chrono::seconds(10));
  }
  ~StoreClient() override { --owner_.connections; }
  StoreClient(const StoreClient&) = delete;
  StoreClient& operator=(const StoreClient&) = delete;

  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<StoreClient>(host_); }

  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const Bytes& value) override {
    const std::lock_guard lock(in_use_);
    ask("set " + key, [&] { put(key, value); });
  }

  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    const std::lock_guard lock(in_use_);
    Bytes result;
    ask("compareSet " + key, [&] {
      const auto found = host_->values.find(key);
      const bool equal = found == host_->values.end() ? expected.empty() : found->second == expected;
      if (equal) put(key, desired);
      result = equal ? desired : found == host_->values.end() ? expected : found->second;
    });
    return result;
  }

  Bytes get(const std::string& key) override {
    const std::lock_guard lock(in_use_);
    wait_for({key}, getTimeout());
    Bytes value;
    ask("get " + key, [&] { value = host_->values.at(key); });
    return value;
  }

  int64_t add(const std::string& key, int64_t value) override {
    const std::lock_guard lock(in_use_);
    ask("add " + key, [&] {
      const Bytes before = host_->values[key];
      int64_t number = 0;
      std::from_chars(reinterpret_cast<const char*>(before.data()),
                      reinterpret_cast<const char*>(before.data()) + before.size(), number);
      value += number;
      const std::string text = std::to_string(value);
      put(key, {text.begin(), text.end()});
    });
    return value;
  }

  bool deleteKey(const std::string& key) override {
    const std::lock_guard lock(in_use_);
    bool there = false;
    ask("delete " + key, [&] { there = host_->values.erase(key) > 0; });
    return there;
  }

  bool check(const Keys& keys) override {
    const std::lock_guard lock(in_use_);
    bool all = false;
    ask("check " + keys.at(0), [&] { all = has(keys); });
    return all;
  }

  int64_t getNumKeys() override {
    const std::lock_guard lock(in_use_);
    int64_t count = 0;
    ask("count the keys", [&] { count = static_cast<int64_t>(host_->values.size()); });
    return count;
  }

  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    const std::lock_guard lock(in_use_);
    wait_for(keys, timeout);
  }

  std::vector<Bytes> multiGet(const Keys& keys) override {
    const std::lock_guard lock(in_use_);
    wait_for(keys, getTimeout());
    std::vector<Bytes> values;
    ask("multiGet " + keys.at(0), [&] {
      for (const auto& key : keys) values.push_back(host_->values.at(key));
    });
    return values;
  }

  void append(const std::string& key, const Bytes& value) override {
    const std::lock_guard lock(in_use_);
    ask("append " + key, [&] { host_->values[key].insert(host_->values[key].end(), value.begin(), value.end()); });
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    const std::lock_guard lock(in_use_);
    ask("multiSet " + keys.at(0), [&] {
      for (size_t i = 0; i < keys.size(); ++i) put(keys[i], values[i]);
    });
  }
  bool hasExtendedApi() const override { return true; }

 private:
  void wait_for(const Keys& keys, const std::chrono::milliseconds& timeout) {
    Scheduler& scheduler = network().scheduler;
    const Time deadline = scheduler.now() + std::chrono::nanoseconds(timeout).count();
    for (;;) {
      bool all = false;
      ask("wait " + keys.at(0), [&] { all = has(keys); });
      if (all) return;
      if (scheduler.now() >= deadline) C10_THROW_ERROR(DistStoreError, "wait timeout");
      scheduler.wait(host_.get(), std::min(deadline, scheduler.now() + kSecond));
    }
  }

  bool has(const Keys& keys) const {
    return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return host_->values.contains(key); });
  }

  void put(const std::string& key, const Bytes& value) {
    host_->values[key] = value;
    if (key.ends_with("generations/newest")) host_->generations.emplace_back(value.begin(), value.end());
    network().scheduler.wake_all(host_.get());
  }

  [[noreturn]] void lose(const std::string& why) {
    lost_ = true;
    C10_THROW_ERROR(DistNetworkError, "the connection to the store is lost: " + why);
  }

  template <class Question>
  void ask(const std::string& what, const Question& question) {
    Scheduler& scheduler = network().scheduler;
    scheduler.point();
    if (scheduler.logs()) scheduler.note("store: " + what);
    if (lost_) lose("it ended before");
    const Time deadline = scheduler.now() + kAnswer;
    travel(this_process(), *host_->process, deadline);
    while (host_->process->stopped_until > scheduler.now()) {
      if (scheduler.now() >= deadline) lose("no answer");
      scheduler.wait(nullptr, std::min(deadline, host_->process->stopped_until));
    }
    if (!host_->process->lives()) lose("closed");
    question();
    travel(*host_->process, this_process(), scheduler.now() + kAnswer);  // it lies there while this one stands still
    if (!host_->process->lives()) lose("closed");
  }

  void travel(const Process& from, const Process& to, Time deadline) {
    if (&from == &to) return;
    Scheduler& scheduler = network().scheduler;
    const Time arrival = network().arrival(from, to);
    scheduler.wait(nullptr, std::min(arrival, deadline));
    if (arrival > deadline) lose("no answer");
  }

  const std::shared_ptr<Network::Host> host_;
  Process& owner_;
  bool lost_ = false;
  std::mutex in_use_;
};

std::shared_ptr<Network::Host> host_at(int port) {
  const auto found = network().hosts.find(port);
  return found == network().hosts.end() || !found->second->process->lives() ? nullptr : found->second;
}

}  // namespace
}  // namespace lockstep::simulation

namespace lockstep::comm {

using simulation::network;

KeptStore host_store(const std::string& address, int port, StoreGuard) {
  if (simulation::host_at(port)) throw Error("cannot listen at " + address + ":" + std::to_string(port));
  auto host = std::make_shared<simulation::Network::Host>();
  host->process = &simulation::this_process();
  network().hosts[port] = host;
  return {c10::make_intrusive<simulation::StoreClient>(host), port};
}

KeptStore host_store_everywhere(int port, StoreGuard guard) {
  return host_store("every address", port, std::move(guard));
}

StorePtr connect_to_store(const std::string&, int port, const JobKey&) {
  network().scheduler.sleep(simulation::kMillisecond);
  const auto host = simulation::host_at(port);
  if (!host) C10_THROW_ERROR(DistNetworkError, "connection refused");
  return c10::make_intrusive<simulation::StoreClient>(host);
}

StorePtr connect_to_tcp_store(const std::string& address, int port) {
  return connect_to_store(address, port, JobKey::known_to_all());
}

bool answers(const std::string&, int port, std::chrono::steady_clock::time_point) {
  network().scheduler.sleep(simulation::kMillisecond);
  return simulation::host_at(port) != nullptr;
}

}  // namespace lockstep::comm
