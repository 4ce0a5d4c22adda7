// AtomicFile: replaces a file whole or not at all.
//
// The bytes go into a temporary file beside the file. If the file is a link, they go beside the link's target, so that
// the link stays. commit() flushes the temporary to the disk and renames it, and then flushes the folder. Whatever ends
// the process or the machine, the old file or the new one is there, whole. Without commit(), and after any failure
// before the renaming, the temporary is removed, and the old file stays as it was. A process that is killed leaves the
// temporary behind, as a hidden file ".NAME.XXXXXXXX.tmp". Use it from one thread at a time.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "file_system.hpp"

namespace lockstep::io {

class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path file, FileSystem& files = real_files());
  ~AtomicFile();
  AtomicFile& operator=(AtomicFile&&) = delete;

  // These functions throw Error that names the file, the operation and the system's reason.
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();

 private:
  [[noreturn]] void fail(const std::string& operation, int error);
  void discard();

  FileSystem& files_;
  std::filesystem::path file_;       // the file as the caller named it
  std::filesystem::path place_;      // the file that its links lead to
  std::filesystem::path temporary_;  // empty once the temporary is renamed or removed
  int fd_ = -1;
};

// Makes an empty file. Returns false if something of that name exists. If several call it at the same time, one gets
// true. Throws Error if the file cannot be made.
bool create_file(const std::filesystem::path& file);

// Replaces `file` by `text`.
void write_file(const std::filesystem::path& file, std::string_view text);

// Lists the temporaries of AtomicFiles in a folder. If nobody writes there, they were left behind. A folder that cannot
// be read gives none.
std::vector<std::filesystem::path> temporaries_in(const std::filesystem::path& folder);

}  // namespace lockstep::io
