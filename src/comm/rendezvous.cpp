#include "comm/rendezvous.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <lockstep/error.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/seconds.hpp"
#include "comm/sockets.hpp"
#include "io/atomic_file.hpp"

#include <charconv>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPause = std::chrono::milliseconds(30);
constexpr auto kAnswer = std::chrono::seconds(10);  // a store that takes longer is taken for frozen

std::string place(const std::string& address, int port) {
  return (address.find(':') == std::string::npos ? address : "[" + address + "]") + ":" + std::to_string(port);
}

// Where the process with rank 0 leaves its port for the others of its machine. Only the user's own processes are asked.
std::string port_file_of(const std::string& job) {
  std::string name = "lockstep-" + std::to_string(getuid()) + "-" + job + ".port";
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  return (std::filesystem::temp_directory_path() / name).string();
}

// 0: not there yet, or another user's.
int read_port(const std::string& file) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return 0;
  struct stat status {};
  char text[16] = {};
  const bool ours = fstat(fd, &status) == 0 && status.st_uid == getuid();
  const ssize_t size = ours ? read(fd, text, sizeof text) : 0;
  close(fd);
  int port = 0;
  if (size > 0) std::from_chars(text, text + size, port);
  return port;
}

}  // namespace

c10::intrusive_ptr<c10d::TCPStore> host_store(const std::string& address, int port) {
  const auto [fd, bound_port] = listen_on(address, port);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(bound_port);
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = fd;  // so that it listens at this address alone
  try {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const c10::Error& error) {
    throw Error("cannot keep a store at " + place(address, bound_port) + ": " + error.what_without_backtrace());
  }
}

Rendezvous::Rendezvous(LaunchEnvironment launch, std::chrono::milliseconds timeout) : launch_(std::move(launch)) {
  const auto deadline = Clock::now() + timeout;
  address_ = launch_.address.empty() ? "127.0.0.1" : numeric_address(launch_.address);
  port_ = launch_.port;
  if (is_loopback(address_) && launch_.local_world_size < launch_.world_size) {
    throw Error("MASTER_ADDR=" + launch_.address + " means this machine itself (" + address_ + "), but the " +
                std::to_string(launch_.world_size) +
                " processes are on several machines: set it to an address of rank "
                "0's machine that the others reach");
  }
  if (launch_.port == 0 && launch_.job.empty()) {
    throw Error(launch_.launcher +
                " gives the job no name by which its processes could find each other: set MASTER_PORT "
                "to a free port, for all processes");
  }
  if (launch_.rank == 0 && !launch_.agent_store) host();
  if (!server_) find_host(deadline, timeout);
  local_address_ = local_address_towards(address_, port_);
}

Rendezvous::~Rendezvous() {
  if (!port_file_.empty()) unlink(port_file_.c_str());
}

void Rendezvous::host() {
  server_ = host_store(address_, port_);
  port_ = server_->getPort();
  if (launch_.port != 0) return;
  const std::string file = port_file_of(launch_.job);
  io::write_file(file, std::to_string(port_));
  port_file_ = file;
}

void Rendezvous::find_host(Clock::time_point deadline, std::chrono::milliseconds timeout) {
  const std::string file = launch_.port == 0 ? port_file_of(launch_.job) : "";
  for (;;) {
    if (!file.empty()) port_ = read_port(file);  // again each time: it may be left over from a job that was killed
    if (port_ != 0 && answers(address_, port_, deadline)) return;
    if (Clock::now() + kPause >= deadline) break;
    std::this_thread::sleep_for(kPause);
  }
  const std::string whose = launch_.agent_store ? "the launcher keeps" : "rank 0's process should keep";
  const std::string where =
      file.empty() ? place(address_, port_) + " (MASTER_ADDR and MASTER_PORT)" : "the port that should be in " + file;
  throw Error("process " + std::to_string(launch_.rank) + " of " + std::to_string(launch_.world_size) + " waited " +
              seconds(timeout) + " for the store that " + whose + " at " + where +
              ", but nothing answers. Was rank 0 started, and does it call run()? If it only takes long, raise "
              "LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)");
}

StorePtr Rendezvous::connect(const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>("lockstep/" + launch_.job + "/" + prefix, idle_client());
}

void Rendezvous::drop_connections() {
  const std::lock_guard lock(mutex_);
  clients_.clear();
}

c10::intrusive_ptr<c10d::TCPStore> Rendezvous::idle_client() {
  const std::lock_guard lock(mutex_);
  for (const auto& client : clients_) {
    if (client.use_count() == 1) return client;
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port_);
  options.timeout = kAnswer;
  try {
    clients_.push_back(c10::make_intrusive<c10d::TCPStore>(address_, options));
    limit_silence(address_, port_, kAnswer);  // c10d itself waits for an answer without end
  } catch (const c10::Error& error) {
    throw Error("process " + std::to_string(launch_.rank) + " cannot use the store at " + place(address_, port_) +
                ": " + error.what_without_backtrace());
  }
  return clients_.back();
}

}  // namespace lockstep::comm
