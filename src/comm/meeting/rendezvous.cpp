#include "rendezvous.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/libtorch_log.hpp"
#include "base/seconds.hpp"
#include "io/atomic_file.hpp"
#include "sockets.hpp"
#include "stored.hpp"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <thread>
#include <utility>

namespace lockstep::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPause = std::chrono::milliseconds(30);

// The key of the job's size, in words, which the process that keeps the store leaves.
const std::string kSize = "lockstep/size";

// Such a name means another machine on each machine, so it is a mistake for several machines. Other names may mean
// loopback on one machine alone: Debian's /etc/hosts gives a machine's own name the address 127.0.1.1.
bool is_every_machines_own(const std::string& host) {
  return is_loopback(host) || host.find("localhost") != std::string::npos || host == "ip6-loopback";
}

std::string port_file_of(const std::string& job) {
  std::string name = "lockstep-" + std::to_string(getuid()) + "-" + job + ".port";
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  return (std::filesystem::temp_directory_path() / name).string();
}

}  // namespace

PortNote::PortNote(const std::string& job) : file_(port_file_of(job)) {}

void PortNote::leave(int port) {
  io::write_file(file_, std::to_string(port));
  is_left_ = true;
}

// A file of another user's counts for nothing.
int PortNote::read() const {
  const int fd = open(file_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return 0;
  struct stat status {};
  char text[16] = {};
  const bool ours = fstat(fd, &status) == 0 && status.st_uid == getuid();
  const ssize_t size = ours ? ::read(fd, text, sizeof text) : 0;
  close(fd);
  int port = 0;
  if (size > 0) std::from_chars(text, text + size, port);
  return port;
}

void PortNote::take_away() {
  if (is_left_) unlink(file_.c_str());
  is_left_ = false;
}

std::string job_prefix(const std::string& job) {
  return "lockstep/" + job + "/";
}

std::string another_job_text(const std::string& size) {
  return "another job, of " + size +
         ", runs at this MASTER_PORT: each job needs a MASTER_PORT of its own. Jobs with different keys "
         "(LOCKSTEP_JOB_KEY_FILE) do not mix";
}

std::string loopback_address() {
  for (const char* const address : {"127.0.0.1", "::1"}) {
    try {
      if (local_address_towards(address, /*port=*/1) == address) return address;
    } catch (const Error&) {  // there is no way to it
    }
  }
  throw Error(
      "this machine does not reach itself, neither at 127.0.0.1 nor at ::1, and there its processes meet. Bring its "
      "loopback interface up: ip link set lo up",
      {Error::machine});
}

Rendezvous::Rendezvous(LaunchEnvironment launch, const WaitLimit& limit)
    : launch_(std::move(launch)),
      key_(launch_.key_file.empty() ? std::nullopt : std::optional(JobKey::from_file(launch_.key_file))) {
  const auto deadline = Clock::now() + limit.timeout;
  address_ = launch_.address.empty() ? loopback_address() : numeric_address(launch_.address);
  port_ = launch_.port;
  if (on_several_machines() && is_loopback(address_) && is_every_machines_own(launch_.address)) {
    throw Error(given_address() + " means this machine itself (" + address_ + "), but the " +
                std::to_string(launch_.world_size) +
                " processes are on several machines: set it to an address of rank "
                "0's machine that the others reach");
  }
  if (launch_.port == 0 && launch_.job.empty()) {
    throw Error(launch_.launcher +
                " gives the job no name by which its processes could find each other: set MASTER_PORT "
                "to a free port, for all processes");
  }
  if (launch_.port == 0) note_.emplace(launch_.job);
  if (launch_.rank == 0 && !launch_.agent_store) host();
  if (!server_) find_host(deadline, limit);
  if (!server_ && !launch_.agent_store) check_size(deadline, limit);
  if (launch_.port == 0) add_to_count(*connect("found"), "count", 1);
  if (on_several_machines() && is_loopback(address_)) {
    learn_local_address(deadline, limit);
  } else {
    local_address_ = local_address_towards(address_, port_);
    if (on_several_machines()) connect("network")->set("address", local_address_);
  }
}

void Rendezvous::host() {
  const bool own_name = on_several_machines() && is_loopback(address_);  // the others know it by another address
  StoreGuard guard{key_.value_or(JobKey::known_to_all()),
                   [](const std::string& text) { warn_as_libtorch("lockstep: " + text); }};
  const KeptStore kept =
      own_name ? host_store_everywhere(port_, std::move(guard)) : host_store(address_, port_, std::move(guard));
  server_ = kept.store;
  port_ = kept.port;
  server_->set(kSize, size_text());
  if (note_) note_->leave(port_);
}

// Rank 0's machine reaches its own name by loopback, which the other machines do not reach. So the other machines leave
// their address, and reach this machine at the address towards there.
void Rendezvous::learn_local_address(Clock::time_point deadline, const WaitLimit& limit) {
  const auto store = connect("network");
  while (!store->check({"address"})) {
    limit.check(launch_.process_name());
    if (Clock::now() >= deadline) {
      throw Error(
          launch_.process_name() + " on " + host_name() + " waited " + seconds(limit.timeout) +
              " for the first process of another machine, and none came. Was one started there? Here " +
              given_address() + " means this machine itself (" + address_ +
              "): if it means another one there, set it to an address of " + host_name() +
              " that the others reach. If starting only takes long, raise LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)",
          {Error::late});
    }
    std::this_thread::sleep_for(kPause);
  }
  local_address_ = local_address_towards(store->get_to_str("address"), port_);
}

void Rendezvous::find_host(Clock::time_point deadline, const WaitLimit& limit) {
  for (;;) {
    limit.check(launch_.process_name());
    // The note is read each time, since it may be left from a job that was killed.
    if (note_) port_ = note_->read();
    if (port_ != 0 && answers(address_, port_, deadline)) return note_.reset();
    if (Clock::now() + kPause >= deadline) break;
    std::this_thread::sleep_for(kPause);
  }
  const std::string whose = launch_.agent_store ? "the launcher keeps" : "rank 0's process should keep";
  const std::string itself =
      on_several_machines() && is_loopback(address_) ? "; " + given_address() + " means this machine itself here" : "";
  const std::string where = note_ ? "the port that should be in " + note_->place()
                                  : place_text(address_, port_) + " (MASTER_ADDR and MASTER_PORT" + itself + ")";
  throw Error(launch_.process_name() + " waited " + seconds(limit.timeout) + " for the store that " + whose + " at " +
                  where +
                  ", but nothing answers. Was rank 0 started, and does it call run()? If it only takes long, raise "
                  "LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)",
              {Error::late});
}

// The process that keeps the store has the port, so the processes of another job are wrong here. Let them leave nothing
// that this job's processes would take for a message of this job.
void Rendezvous::check_size(Clock::time_point deadline, const WaitLimit& limit) {
  const StorePtr store = idle_client();
  deadline = std::min(deadline, Clock::now() + std::chrono::seconds(5));  // an older release does not say its size
  while (!store->check({kSize})) {                                        // the store may have just begun to listen
    limit.check(launch_.process_name());
    if (Clock::now() >= deadline) return;
    std::this_thread::sleep_for(kPause);
  }
  const std::string size = store->get_to_str(kSize);
  if (size != size_text()) throw Error(launch_.process_name() + ": " + another_job_text(size));
}

std::string Rendezvous::size_text() const {
  return std::to_string(launch_.world_size) + " processes";
}

StorePtr Rendezvous::connect(const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(job_prefix(launch_.job) + prefix, idle_client());
}

std::string Rendezvous::given_address() const {
  return "MASTER_ADDR=" + launch_.address;
}

void Rendezvous::take_note_away() {
  const std::lock_guard lock(mutex_);
  if (!note_ || !note_->is_left()) return;
  if (stored_count(*server_, job_prefix(launch_.job) + "found/count") < launch_.world_size) return;
  note_->take_away();
}

void Rendezvous::drop_connections() {
  const std::lock_guard lock(mutex_);
  clients_.clear();
}

StorePtr Rendezvous::new_client() const {
  if (launch_.tcp_store) return connect_to_tcp_store(address_, port_);
  return connect_to_store(address_, port_, key_.value_or(JobKey::known_to_all()));
}

StorePtr Rendezvous::idle_client() {
  const std::lock_guard lock(mutex_);
  for (const auto& client : clients_) {
    if (client.use_count() == 1) return client;
  }
  try {
    clients_.push_back(new_client());
  } catch (const c10::Error& error) {
    throw Error(
        launch_.process_name() + " cannot use the store at " + place_text(address_, port_) + ", which " +
            (launch_.agent_store ? "the launcher" : "the process of rank 0") +
            " keeps: " + error.what_without_backtrace() +
            (launch_.agent_store ? ""
                                 : ". Have all machines the same LOCKSTEP_JOB_KEY_FILE, or none? If another job is "
                                   "at this port, give each a port of its own"),
        {Error::machine});
  }
  return clients_.back();
}

}  // namespace lockstep::comm
