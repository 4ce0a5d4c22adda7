// Disk: the file system of simulated processes. It works on a real folder, takes time, and may fail. It becomes full,
// or the machine loses power in the middle of a call, in which case a write leaves a part. Or the disk says that it has
// flushed a file or a folder, and has not.
#pragma once

#include "network.hpp"
#include "scheduler.hpp"
#include "support/failing_files.hpp"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>
#include <utility>

namespace lockstep::simulation {

class Disk : public FailingFiles {
  using Path = std::filesystem::path;

 public:
  explicit Disk(bool eager) : FailingFiles(-1, Mode::error, eager) {}

  // Something that happens in the call with a number, from 0; -1: never.
  struct Event {
    int call = -1;
    std::function<void()> happens = {};
  };
  Event fills = {};  // no call succeeds from then on
  Event power = {};
  Event loses = {};  // the next fsync from then on does nothing
  bool has_lost() const { return has_lost_; }

  int create(const Path& file) override { return fails() ? -1 : FailingFiles::create(file); }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    const auto part = static_cast<size_t>(draw(bytes + 1));
    if (next_ == fills.call || next_ == power.call) FailingFiles::write(fd, data, part);
    return fails() ? -1 : FailingFiles::write(fd, data, std::max<size_t>(part, 1));  // the system may take less, too
  }
  int fsync(int fd) override {
    if (fails()) return -1;
    if (!loses_now()) return FailingFiles::fsync(fd);
    flushed(fd) = torn(written(fd));
    return 0;
  }
  int rename(const Path& from, const Path& to) override { return fails() ? -1 : FailingFiles::rename(from, to); }
  int unlink(const Path& file) override {
    wait();
    return FailingFiles::unlink(file);
  }
  int sync_folder(const Path& folder) override {
    if (fails()) return -1;
    return loses_now() ? 0 : FailingFiles::sync_folder(folder);
  }

 private:
  static uint64_t draw(uint64_t below) { return network().scheduler.draw(below); }

  void wait() {
    Scheduler& scheduler = network().scheduler;
    scheduler.sleep(static_cast<Time>(draw(2 * kMillisecond)));
    const int call = next_++;
    if (call == fills.call) is_full_ = true;
    for (const Event* const event : {&fills, &power}) {
      if (call != event->call) continue;
      event->happens();
      scheduler.point();
    }
  }
  bool fails() {
    wait();
    errno = ENOSPC;
    return is_full_;
  }
  bool loses_now() {
    if (loses.call < 0 || next_ <= loses.call || std::exchange(has_lost_, true)) return false;
    loses.happens();
    return true;
  }

  // Gives nothing of the file, its beginning, or all but a hole: some file systems know the length first.
  static std::string torn(std::string bytes) {
    const size_t begin = draw(bytes.size() + 1), length = draw(bytes.size() - begin + 1);
    const uint64_t kind = draw(4);
    if (kind == 0) return "";
    if (kind == 1) return bytes.substr(0, begin);
    return bytes.replace(begin, length, length, '\0');
  }

  int next_ = 0;  // the call's number
  bool is_full_ = false, has_lost_ = false;
};

}  // namespace lockstep::simulation
