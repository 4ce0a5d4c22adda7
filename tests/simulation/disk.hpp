// Disk: the file system of simulated processes. It works on a real folder, takes its time, and may fail: it becomes
// full, or the machine loses its power in the middle of a call, in which case a write leaves a part.
#pragma once

#include "network.hpp"
#include "scheduler.hpp"
#include "support/failing_files.hpp"

#include <algorithm>
#include <cerrno>
#include <functional>

namespace lockstep::simulation {

class Disk : public FailingFiles {
  using Path = std::filesystem::path;

 public:
  explicit Disk(bool eager) : FailingFiles(-1, Mode::error, eager) {}

  int call_of_fault = -1;  // its number, from 0; -1: none
  bool is_full = false;    // from then on
  std::function<void()> on_fault = [] {};

  int create(const Path& file) override { return fails() ? -1 : FailingFiles::create(file); }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    const auto part = static_cast<size_t>(network().scheduler.draw(bytes + 1));
    if (next_ == call_of_fault) FailingFiles::write(fd, data, part);
    return fails() ? -1 : FailingFiles::write(fd, data, std::max<size_t>(part, 1));  // the system may take less, too
  }
  int fsync(int fd) override { return fails() ? -1 : FailingFiles::fsync(fd); }
  int rename(const Path& from, const Path& to) override { return fails() ? -1 : FailingFiles::rename(from, to); }
  int unlink(const Path& file) override {
    wait();
    return FailingFiles::unlink(file);
  }
  int sync_folder(const Path& folder) override { return fails() ? -1 : FailingFiles::sync_folder(folder); }

 private:
  void wait() {
    Scheduler& scheduler = network().scheduler;
    scheduler.sleep(static_cast<Time>(scheduler.draw(2 * kMillisecond)));
    if (next_++ == call_of_fault) {
      on_fault();
      scheduler.point();
    }
  }
  bool fails() {
    wait();
    errno = ENOSPC;
    return is_full;
  }

  int next_ = 0;  // the call's number
};

}  // namespace lockstep::simulation
