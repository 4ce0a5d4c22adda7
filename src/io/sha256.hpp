// Sha256: the checksum of bytes by SHA-256 (FIPS 180-4), so that files can be verified without another library.
//
// A plain value; used by one thread. Cost: 1 ms for 1.5 MB on x86 processors that have instructions for it, elsewhere
// for 0.3 MB.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep::io {

class Sha256 {
 public:
  using State = std::array<uint32_t, 8>;
  // Goes through `count` blocks of 64 bytes.
  using Blocks = void (*)(State& state, const unsigned char* bytes, size_t count);

  static Blocks in_plain_code();
  static Blocks fastest();  // for this processor; all give the same

  explicit Sha256(Blocks blocks = fastest()) : blocks_(blocks) {}

  void update(const void* data, size_t bytes);
  void update(const std::string& text) { update(text.data(), text.size()); }
  std::string bytes();  // the 32 of all that was given; ends the work
  std::string hex();    // the same in hexadecimal digits

 private:
  Blocks blocks_;
  State state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> rest_{};  // bytes that do not make up a block yet
  uint64_t size_ = 0;                     // bytes so far
};

// What proves that its maker has the key, in 32 bytes (RFC 2104). The time that it takes depends on the sizes alone.
std::string hmac_sha256(const std::string& key, const std::string& text);

}  // namespace lockstep::io
