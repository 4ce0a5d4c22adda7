#include "printed_once.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "io/reason.hpp"

namespace lockstep::cli {

namespace {

constexpr const char* name = "LOCKSTEP_LAUNCH_PRINTED";
constexpr char separator = '\0';
constexpr const char* to_launcher = "to the launcher";  // takes the place of a process's number

ino_t inode(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

// The descriptor that the launcher passed on; -1 if there is none, or if its number now means another file.
int inherited() {
  const char* const value = std::getenv(name);
  if (value == nullptr) return -1;
  const char* const end = value + std::strlen(value);
  int fd = -1;
  ino_t expected = 0;
  const auto colon = std::from_chars(value, end, fd).ptr;
  if (colon == end || std::from_chars(colon + 1, end, expected).ec != std::errc() || inode(fd) != expected) return -1;
  return fd;
}

// Makes one write at the end of the file, so that entries of several processes do not mix.
bool append(int fd, const std::string& speaker, const std::string& text) {
  const std::string entry = speaker + separator + text + separator;
  return write(fd, entry.data(), entry.size()) == static_cast<ssize_t>(entry.size());
}

std::string read_all(int fd) {
  std::string all;
  char buffer[4096];
  ssize_t size = 0;
  while ((size = pread(fd, buffer, sizeof buffer, static_cast<off_t>(all.size()))) > 0) {
    all.append(buffer, static_cast<size_t>(size));
  }
  return all;
}

std::string_view next(std::string_view& entries) {
  const size_t end = entries.find(separator);
  const std::string_view word = entries.substr(0, end);
  entries.remove_prefix(end == std::string_view::npos ? entries.size() : end + 1);
  return word;
}

}  // namespace

PrintedOnce::PrintedOnce() : fd_(memfd_create("lockstep-printed", 0)) {
  if (fd_ < 0 || fcntl(fd_, F_SETFL, O_APPEND) != 0) {
    throw Error("cannot make a file in memory: " + io::reason(errno), {Error::machine});
  }
}

PrintedOnce::~PrintedOnce() {
  close(fd_);
}

std::string PrintedOnce::variable() const {
  return std::string(name) + "=" + std::to_string(fd_) + ":" + std::to_string(inode(fd_));
}

void PrintedOnce::add(const std::string& text) const {
  append(fd_, "launcher", text);
}

bool PrintedOnce::would_fail_again() const {
  const std::string all = read_all(fd_);
  for (std::string_view entries = all; !entries.empty();) {
    if (next(entries) == to_launcher) return true;
    next(entries);
  }
  return false;
}

void note_would_fail_again() {
  if (const int fd = inherited(); fd >= 0) append(fd, to_launcher, "");
}

std::string not_yet_printed(const std::string& text) {
  const int fd = inherited();
  const std::string self = std::to_string(getpid());
  if (fd < 0 || !append(fd, self, text)) return text;
  const std::string all = read_all(fd);
  std::string rest = text;
  for (std::string_view entries = all; !entries.empty();) {
    const std::string_view speaker = next(entries), said = next(entries);
    if (speaker == to_launcher) continue;
    if (speaker == self) {
      if (said == text) break;  // the processes of later entries leave it out themselves
      continue;
    }
    if (said.starts_with(text)) return "";
    if (text.starts_with(std::string(said) + "; ")) rest = text.substr(said.size() + 2);
  }
  return rest;
}

}  // namespace lockstep::cli
