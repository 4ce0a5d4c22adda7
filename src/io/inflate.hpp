// Inflate: decompresses a deflate stream (RFC 1951), as gzip files have it, so that they can be read without another
// library.
//
// Strict: a code that no symbol has, a distance beyond the beginning and a damaged block are Errors. Used by one
// thread. Cost: 1 s for some 200 MB that come out, and 300 kB of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <span>
#include <vector>

namespace lockstep::io {

// The bits of a file, from the lowest of each byte on.
class BitReader {
 public:
  explicit BitReader(std::ifstream& in) : in_(in), buffer_(1 << 16) {}

  // The next `count` <= 16 bits, which stay there. Throws Error: the file ends before.
  uint32_t peek(int count) {
    if (held_ < count) hold(count);
    return static_cast<uint32_t>(bits_ & ((uint64_t{1} << count) - 1));
  }
  void drop(int count) {
    bits_ >>= count;
    held_ -= count;
  }
  uint32_t take(int count) {
    const uint32_t bits = peek(count);
    drop(count);
    return bits;
  }
  void skip_to_byte() { drop(held_ % 8); }
  bool at_end() { return held_ == 0 && !fill(); }

 private:
  void hold(int count);
  bool fill();  // whether there are more bytes

  std::ifstream& in_;
  std::vector<unsigned char> buffer_;
  size_t next_ = 0, end_ = 0;  // in buffer_
  uint64_t bits_ = 0;
  int held_ = 0;
};

class Inflate {
 public:
  explicit Inflate(BitReader& bits) : bits_(bits), window_(kHistory + kAtOnce + kLongestMatch) {}

  // Some more of what comes out; valid until the next call. Empty: the stream has ended. Throws Error, whose text says
  // what is wrong.
  std::span<const unsigned char> more();

 private:
  // Symbols by the bits that come next, of which a code's are the first.
  struct Codes {
    int bits = 0;                                 // of the longest code
    std::vector<uint16_t> symbols_and_lengths{};  // a symbol times 16, plus its code's length; 0: no code
  };
  enum class Block { none, stored, coded };

  static constexpr size_t kHistory = 1 << 15, kAtOnce = 1 << 16, kLongestMatch = 258;

  static Codes codes_of(std::span<const uint8_t> lengths);  // of each symbol's code; 0: none
  void begin_block();
  void read_codes();
  uint32_t symbol(const Codes& codes);
  void copy_stored();
  void decode_symbols();

  BitReader& bits_;
  std::vector<unsigned char> window_;  // what came out last, for later matches
  size_t end_ = 0;                     // of what is in window_
  Block block_ = Block::none;
  bool is_last_ = false;  // the block
  uint32_t stored_ = 0;   // bytes of the block that are left
  Codes literals_, distances_;
};

}  // namespace lockstep::io
