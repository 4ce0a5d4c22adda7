#include "port_note.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/atomic_file.hpp"
#include "rendezvous.hpp"
#include "sockets.hpp"
#include "stored.hpp"

#include <charconv>
#include <filesystem>

namespace lockstep::comm {
namespace {

constexpr int kLargestPort = 65535;

std::string port_file_of(const std::string& job) {
  std::string name = "lockstep-" + std::to_string(getuid()) + "-" + job + ".port";
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  return (std::filesystem::temp_directory_path() / name).string();
}

// Only the user's own processes are asked.
int port_in_file(const std::string& file) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
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

}  // namespace

PortNote::PortNote(const std::string& job, const std::optional<StorePlace>& store)
    : name_(store ? job_prefix(job) + "port" : port_file_of(job)), told_in_(store) {}

c10d::Store& PortNote::store() {
  if (!store_) store_ = connect_to_tcp_store(numeric_address(told_in_->address), told_in_->port);
  return *store_;
}

void PortNote::leave(int port) {
  if (told_in_) {
    store().set(name_, std::to_string(port));
    store_.reset();
    return;
  }
  io::write_file(name_, std::to_string(port));
  is_left_ = true;
}

int PortNote::read() {
  if (!told_in_) return port_in_file(name_);
  const auto port = stored_count(store(), name_);
  if (port > kLargestPort) throw ForeignValue(name_, std::to_string(port));
  return static_cast<int>(port);
}

void PortNote::take_away() {
  if (is_left_) unlink(name_.c_str());
  is_left_ = false;
}

std::string PortNote::place() const {
  if (!told_in_) return name_;
  return "torchrun's store at " + place_text(told_in_->address, told_in_->port) + " under " + name_;
}

}  // namespace lockstep::comm
