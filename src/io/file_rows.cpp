#include "file_rows.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include <cerrno>
#include <string>
#include <utility>

#include "reason.hpp"

namespace lockstep::io {

FileRows::FileRows(std::filesystem::path file, uint64_t size)
    : file_(std::move(file)), descriptor_(open(file_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (descriptor_ < 0) fail(reason(errno));
  struct stat now {};
  const int error = fstat(descriptor_, &now) == 0 ? 0 : errno;
  if (error == 0 && static_cast<uint64_t>(now.st_size) == size) return;
  close(descriptor_);
  if (error != 0) fail(reason(error));
  fail("it has " + std::to_string(now.st_size) + " bytes, and had " + std::to_string(size) +
       " when the run began; data must not change while they are trained on");
}

FileRows::~FileRows() {
  close(descriptor_);
}

void FileRows::read(const TensorPlace& place, int64_t row, int64_t count, void* into) const {
  const uint64_t of_row = (place.end - place.begin) / static_cast<uint64_t>(place.shape[0]);
  uint64_t at = place.begin + static_cast<uint64_t>(row) * of_row, left = static_cast<uint64_t>(count) * of_row;
  for (auto* here = static_cast<char*>(into); left > 0;) {
    const ssize_t done = pread(descriptor_, here, left, static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(reason(errno));
    if (done == 0) fail("it ends at byte " + std::to_string(at) + ": somebody has cut it since the run began");
    here += done;
    at += static_cast<uint64_t>(done);
    left -= static_cast<uint64_t>(done);
  }
}

void FileRows::fail(const std::string& why) const {
  throw Error("cannot read '" + file_.string() + "': " + why, {Error::file});
}

}  // namespace lockstep::io
