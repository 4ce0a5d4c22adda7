// Digest: a checksum of bytes, by OpenSSL's name of the algorithm ("SHA256", "MD5").
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace lockstep::io {

class Digest {
 public:
  // Throws Error if OpenSSL is not there, or does not offer the algorithm.
  explicit Digest(const char* algorithm);
  void update(const void* data, size_t bytes);
  void update(const std::string& text) { update(text.data(), text.size()); }
  std::string hex();  // the digest of all that was given; ends the work

 private:
  std::shared_ptr<void> context_;
};

}  // namespace lockstep::io
