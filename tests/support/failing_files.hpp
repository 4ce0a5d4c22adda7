// FailingFiles: the disk after a call failed, or after the machine lost its power at one.
//
// It works on a real folder and remembers what is on the disk for sure: a file's bytes as of its last fsync, and
// names as of the folder's. crash() makes the folder look as it would after the power came back.
#pragma once

#include <cerrno>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "io/file_system.hpp"

namespace lockstep {

class FailingFiles : public io::FileSystem {
  using Path = std::filesystem::path;

 public:
  enum class Mode { error, power_cut };

  // The call with this number, from 0, fails: once, or with all that come after it. After a power cut the disk may know
  // of unsynced renames and removals (`eager`), or not.
  FailingFiles(int failing_call, Mode mode, bool eager = false) : failing_(failing_call), mode_(mode), eager_(eager) {}

  int calls() const { return calls_; }
  const std::vector<std::string>& log() const { return log_; }

  int create(const Path& file) override {
    if (fails("create " + file.filename().string())) return -1;
    const int fd = FileSystem::create(file);
    if (fd >= 0) {
      open_[fd] = file;
      unsynced_.push_back({file, std::nullopt});
      synced_bytes_[file] = "";
    }
    return fd;
  }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    return fails("write") ? -1 : FileSystem::write(fd, data, bytes);
  }
  int fsync(int fd) override {
    if (fails("fsync")) return -1;
    synced_bytes_[open_.at(fd)] = contents(open_.at(fd));
    return FileSystem::fsync(fd);
  }
  int close(int fd) override {
    open_.erase(fd);
    FileSystem::close(fd);  // a process that ends closes its files too
    return fails("close") ? -1 : 0;
  }
  int rename(const Path& from, const Path& to) override {
    if (fails("rename " + to.filename().string())) return -1;
    unsynced_.push_back({to, on_disk(to)});
    synced_bytes_[to] = synced_bytes_.at(from);
    synced_bytes_.erase(from);
    return FileSystem::rename(from, to);
  }
  int unlink(const Path& file) override {
    if (fails("unlink " + file.filename().string())) return -1;
    unsynced_.push_back({file, on_disk(file)});
    synced_bytes_.erase(file);
    return FileSystem::unlink(file);
  }
  int sync_folder(const Path& folder) override {
    if (fails("sync " + folder.filename().string())) return -1;
    std::erase_if(unsynced_, [&](const Change& change) { return change.file.parent_path() == folder; });
    return FileSystem::sync_folder(folder);
  }

  void crash() {
    for (const auto& [file, bytes] : synced_bytes_) put(file, bytes);
    if (eager_) return;
    for (auto change = unsynced_.rbegin(); change != unsynced_.rend(); ++change) {
      change->before ? put(change->file, *change->before) : void(FileSystem::unlink(change->file));
    }
  }

 protected:
  std::string& flushed(int fd) { return synced_bytes_[open_.at(fd)]; }  // bytes that are on the disk for sure
  std::string written(int fd) const { return contents(open_.at(fd)); }

 private:
  struct Change {
    Path file;
    std::optional<std::string> before;  // bytes that the name stood for
  };

  bool fails(const std::string& call) {
    log_.push_back(call);
    const int number = calls_++;
    if (number != failing_ && (mode_ == Mode::error || number < failing_)) return false;
    errno = EIO;
    return true;
  }
  static std::string contents(const Path& file) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    return text.str();
  }
  // Gives what the disk holds of a file that existed before this object.
  std::optional<std::string> on_disk(const Path& file) const {
    if (const auto known = synced_bytes_.find(file); known != synced_bytes_.end()) return known->second;
    if (!std::filesystem::exists(file)) return std::nullopt;
    return contents(file);
  }
  static void put(const Path& file, const std::string& bytes) {
    std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  const int failing_;
  const Mode mode_;
  const bool eager_;
  int calls_ = 0;
  std::vector<std::string> log_;
  std::map<int, Path> open_;
  std::map<Path, std::string> synced_bytes_;  // bytes of the files that were made or renamed here
  std::vector<Change> unsynced_;              // changes of names, in their order
};

}  // namespace lockstep
