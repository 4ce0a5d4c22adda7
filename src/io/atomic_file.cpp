#include "atomic_file.hpp"

#include <lockstep/base/error.hpp>

#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

#include "links.hpp"
#include "reason.hpp"

namespace lockstep::io {
namespace {

constexpr size_t longest_name = 255;  // the bytes that Linux's file systems allow

// Cuts a name to at most `bytes` bytes, in whole characters of UTF-8.
std::string shortened(std::string name, size_t bytes) {
  if (name.size() <= bytes) return name;
  while (bytes > 0 && (name[bytes] & 0xC0) == 0x80) --bytes;
  name.resize(bytes);
  return name;
}

// Names a hidden sibling of `file`, another one with every call.
std::filesystem::path temporary_for(const std::filesystem::path& file) {
  static constexpr char letters[] = "abcdefghijklmnopqrstuvwxyz234567";
  std::random_device random;
  std::string end(".");
  for (int i = 0; i < 8; ++i) end += letters[random() % 32];
  end += ".tmp";
  return file.parent_path() / ("." + shortened(file.filename().string(), longest_name - 1 - end.size()) + end);
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path file, FileSystem& files)
    : files_(files), file_(std::move(file)), place_(behind_links(file_)) {
  // Refuses a place that is no file: renaming would take a device or a pipe away, and fail for a folder.
  std::error_code ignored;
  const auto there = std::filesystem::status(place_, ignored);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    throw Error("cannot write '" + file_.string() + "': it is " +
                    (std::filesystem::is_directory(there) ? "a directory" : "no regular file"),
                {Error::file});
  }
  do {
    temporary_ = temporary_for(place_);
    fd_ = files_.create(temporary_);
  } while (fd_ < 0 && errno == EEXIST);
  if (fd_ < 0) {
    int error = errno;
    temporary_.clear();
    std::string folder = place_.parent_path().empty() ? "." : place_.parent_path().string();
    fail("creating a file in folder '" + folder + "'", error);
  }
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::write(const void* data, size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    ssize_t written = files_.write(fd_, next, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("writing", errno);
    next += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  // Some file systems report a full disk only here, others only from close.
  if (files_.fsync(fd_) != 0) fail("flushing to the disk", errno);
  if (files_.close(std::exchange(fd_, -1)) != 0) fail("closing", errno);
  if (files_.rename(temporary_, place_) != 0) fail("renaming the finished temporary", errno);
  temporary_.clear();
  if (files_.sync_folder(place_.parent_path()) != 0) fail("flushing its folder to the disk", errno);
}

void AtomicFile::fail(const std::string& operation, int error) {
  discard();
  throw Error("cannot write '" + file_.string() + "': " + operation + " failed: " + reason(error), {Error::file});
}

void AtomicFile::discard() {
  if (fd_ >= 0) files_.close(std::exchange(fd_, -1));
  if (!temporary_.empty()) files_.unlink(temporary_);
  temporary_.clear();
}

bool create_file(const std::filesystem::path& file) {
  const int fd = real_files().create(file);
  if (fd < 0 && errno == EEXIST) return false;
  if (fd < 0) throw Error("cannot write '" + file.string() + "': " + reason(errno), {Error::file});
  real_files().close(fd);
  return true;
}

void write_file(const std::filesystem::path& file, std::string_view text) {
  AtomicFile out(file);
  out.write(text);
  out.commit();
}

std::vector<std::filesystem::path> temporaries_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const auto& file = entry.path();
    if (file.filename().string().starts_with('.') && file.extension() == ".tmp") found.push_back(file);
  }
  return found;
}

}  // namespace lockstep::io
