// A JobKey is a secret of 256 bits that the processes of a job know, and nobody else. Two processes prove to each other
// that both know the key, and do not say it: each signs (HMAC-SHA256) a nonce that the other has just made up. No text
// of the key exists anywhere, so none can be printed. A JobKey is thread-safe. A signature takes about a microsecond.
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::comm {

// Gives 32 bytes that nobody has seen before.
std::string fresh_nonce();

class JobKey {
 public:
  static constexpr size_t kBytes = 32;  // the bytes of a key, of a nonce and of a signature

  // Makes the key from a file's bytes: at least 32, the same on all machines. Throws Error, which says what to do, if
  // the file is missing, too short or too long, belongs to another user, or can be read by others.
  static JobKey from_file(const std::filesystem::path& file);

  // Gives the key of a job that was given none. Such a key keeps out what is no process of lockstep, but nobody who
  // knows this source.
  static JobKey known_to_all() { return {}; }

  // Signs all parts, also where one ends and the next one begins.
  std::string sign(const std::vector<std::string>& parts) const;

  // Tells whether this is the signature of the parts. Takes the same time wherever two signatures differ.
  bool has_signed(const std::string& signature, const std::vector<std::string>& parts) const;

  ~JobKey();
  JobKey(const JobKey&) = default;
  JobKey& operator=(const JobKey&) = default;

 private:
  JobKey() = default;

  std::array<unsigned char, kBytes> secret_{};
};

// Holds a fresh key in memory. Processes of the same user can read the key as a file while the object lives.
class HandedKey {
 public:
  HandedKey();  // throws Error
  ~HandedKey();
  HandedKey& operator=(HandedKey&&) = delete;

  std::string file() const;
  JobKey key() const { return JobKey::from_file(file()); }

 private:
  int fd_;
};

}  // namespace lockstep::comm
