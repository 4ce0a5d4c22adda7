#include "job_key.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>

#include "io/libcrypto.hpp"
#include "io/reason.hpp"

#include <cerrno>

namespace lockstep::comm {
namespace {

constexpr size_t kLongestKeyFile = 4096;
const char* const kHowToMakeAKey =
    ". Make one with (umask 077; head -c 32 /dev/urandom >FILE), and copy it to all machines";

[[noreturn]] void refuse_key_file(const std::filesystem::path& file, const std::string& why) {
  throw Error("the job's key, LOCKSTEP_JOB_KEY_FILE=" + file.string() + ": " + why, {Error::file});
}

std::string checked_bytes(int fd, const std::filesystem::path& file) {
  struct stat status {};
  if (fstat(fd, &status) != 0) refuse_key_file(file, io::reason(errno));
  if (!S_ISREG(status.st_mode)) refuse_key_file(file, "it is no file");
  if (status.st_uid != geteuid() && status.st_uid != 0) refuse_key_file(file, "it belongs to another user");
  if ((status.st_mode & 077) != 0) refuse_key_file(file, "others may read or write it; chmod 600 it");
  std::string bytes(kLongestKeyFile + 1, '\0');
  const ssize_t size = pread(fd, bytes.data(), bytes.size(), 0);
  if (size < 0) refuse_key_file(file, io::reason(errno));
  bytes.resize(static_cast<size_t>(size));
  if (bytes.size() < JobKey::kBytes) {
    refuse_key_file(file, "it has " + std::to_string(size) + " bytes, and a key has at least 32" + kHowToMakeAKey);
  }
  if (bytes.size() > kLongestKeyFile) refuse_key_file(file, "it is longer than 4096 bytes, so it is hardly a key");
  return bytes;
}

}  // namespace

std::string fresh_nonce() {
  std::string nonce(JobKey::kBytes, '\0');
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw Error("the system gives no random numbers: " + io::reason(errno), {Error::machine});
  }
  return nonce;
}

JobKey JobKey::from_file(const std::filesystem::path& file) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    const bool is_launchers = file.string().starts_with("/proc/");
    refuse_key_file(file,
                    io::reason(error) + (error != ENOENT ? ""
                                         : is_launchers  ? ". The launcher that made it is gone, or not seen from here"
                                                         : kHowToMakeAKey));
  }
  JobKey key;
  try {
    const io::Libcrypto& crypto = io::libcrypto();
    std::string bytes = checked_bytes(fd, file);
    crypto.EVP_Digest(bytes.data(), bytes.size(), key.secret_.data(), nullptr, crypto.EVP_sha256(), nullptr);
    explicit_bzero(bytes.data(), bytes.size());
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  return key;
}

JobKey::~JobKey() {
  explicit_bzero(secret_.data(), secret_.size());
}

std::string JobKey::sign(const std::vector<std::string>& parts) const {
  std::string text;
  for (const auto& part : parts) text += std::to_string(part.size()) + ":" + part;
  std::string signature(kBytes, '\0');
  unsigned size = 0;
  const io::Libcrypto& crypto = io::libcrypto();
  if (crypto.HMAC(crypto.EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
                  reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                  reinterpret_cast<unsigned char*>(signature.data()), &size) == nullptr) {
    throw Error("OpenSSL does not offer HMAC-SHA256 here, which processes of a job show each other their key with",
                {Error::machine});
  }
  return signature;
}

bool JobKey::has_signed(const std::string& signature, const std::vector<std::string>& parts) const {
  return signature.size() == kBytes && io::libcrypto().CRYPTO_memcmp(signature.data(), sign(parts).data(), kBytes) == 0;
}

HandedKey::HandedKey() : fd_(memfd_create("lockstep-key", MFD_CLOEXEC)) {
  std::string secret = fresh_nonce();
  const auto size = static_cast<ssize_t>(secret.size());
  const bool made = fd_ >= 0 && fchmod(fd_, 0600) == 0 && pwrite(fd_, secret.data(), secret.size(), 0) == size;
  const int error = errno;
  explicit_bzero(secret.data(), secret.size());
  if (made) return;
  if (fd_ >= 0) close(fd_);
  throw Error("cannot make a file in memory for the job's key: " + io::reason(error), {Error::machine});
}

HandedKey::~HandedKey() {
  close(fd_);
}

std::string HandedKey::file() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd_);
}

}  // namespace lockstep::comm
