#include "inflate.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "reason.hpp"

namespace lockstep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "bits are read as bytes lie in memory");

constexpr int longest_code = 15;
constexpr uint32_t end_of_block = 256;

// RFC 1951, section 3.2.5: the symbols 257 … 285 are lengths, and 0 … 29 distances, each a base plus extra bits.
constexpr std::array<uint16_t, 29> length_bases = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                                   31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr std::array<uint8_t, 29> length_bits = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                                 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr std::array<uint16_t, 30> distance_bases = {1,    2,    3,    4,    5,    7,    9,    13,    17,    25,
                                                     33,   49,   65,   97,   129,  193,  257,  385,   513,   769,
                                                     1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr std::array<uint8_t, 30> distance_bits = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                                   6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
// The order in which a block gives the lengths of the codes of code lengths.
constexpr std::array<uint8_t, 19> order_of_lengths = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

uint32_t reversed(uint32_t code, int length) {
  uint32_t result = 0;
  for (int bit = 0; bit < length; ++bit) result |= (code >> bit & 1) << (length - 1 - bit);
  return result;
}

}  // namespace

bool BitReader::fill() {
  if (next_ < end_) return true;
  in_.read(reinterpret_cast<char*>(buffer_.data()), static_cast<std::streamsize>(buffer_.size()));
  if (in_.bad()) throw Error("it cannot be read: " + reason(errno));
  next_ = 0;
  end_ = static_cast<size_t>(in_.gcount());
  return end_ > 0;
}

// Eight bytes at once where they are there. What bits_ then has above held_ are the same bits that come next.
void BitReader::hold(int count) {
  if (end_ - next_ >= sizeof bits_) {
    uint64_t more = 0;
    std::memcpy(&more, &buffer_[next_], sizeof more);
    bits_ |= more << held_;
    const int bytes = (63 - held_) / 8;
    next_ += static_cast<size_t>(bytes);
    held_ += 8 * bytes;
    return;
  }
  for (; held_ < count; held_ += 8) {
    if (!fill()) throw Error("it is cut off: its gzip stream ends too early");
    bits_ |= uint64_t{buffer_[next_++]} << held_;
  }
}

Inflate::Codes Inflate::codes_of(std::span<const uint8_t> lengths) {
  std::array<uint32_t, longest_code + 1> count{}, next{};
  for (const uint8_t length : lengths) ++count[length];
  count[0] = 0;
  Codes codes;
  int64_t left = 1;  // codes of the present length that are not in use
  for (int length = 1; length <= longest_code; ++length) {
    left = 2 * left - count[length];
    if (left < 0) throw Error("corrupt gzip: too many codes");
    next[length] = (next[length - 1] + count[length - 1]) << 1;
    if (count[length] > 0) codes.bits = length;
  }
  if (left > 0 && codes.bits > 1) throw Error("corrupt gzip: too few codes");
  const uint32_t size = 1u << codes.bits;
  codes.symbols_and_lengths.assign(size, 0);
  for (size_t symbol = 0; symbol < lengths.size(); ++symbol) {
    const int length = lengths[symbol];
    if (length == 0) continue;
    const auto entry = static_cast<uint16_t>(symbol << 4 | static_cast<size_t>(length));
    for (uint32_t at = reversed(next[length]++, length); at < size; at += 1u << length) {
      codes.symbols_and_lengths[at] = entry;
    }
  }
  return codes;
}

// A code near the file's end may be peeked at with bits behind it: a gzip member's checksum follows.
uint32_t Inflate::symbol(const Codes& codes) {
  const uint16_t entry = codes.symbols_and_lengths[bits_.peek(codes.bits)];
  if (entry == 0) throw Error("corrupt gzip: an unknown code");
  bits_.drop(entry & 15);
  return entry >> 4;
}

void Inflate::begin_block() {
  is_last_ = bits_.take(1) == 1;
  const uint32_t type = bits_.take(2);
  if (type == 3) throw Error("corrupt gzip: an unknown kind of block");
  if (type == 0) {
    bits_.skip_to_byte();
    stored_ = bits_.take(16);
    if ((bits_.take(16) ^ stored_) != 0xffff) throw Error("corrupt gzip: a stored block's length is wrong");
    block_ = stored_ > 0 ? Block::stored : Block::none;
    return;
  }
  block_ = Block::coded;
  if (type == 2) return read_codes();
  std::array<uint8_t, 288> lengths;  // section 3.2.6
  std::fill(lengths.begin(), lengths.begin() + 144, 8);
  std::fill(lengths.begin() + 144, lengths.begin() + 256, 9);
  std::fill(lengths.begin() + 256, lengths.begin() + 280, 7);
  std::fill(lengths.begin() + 280, lengths.end(), 8);
  literals_ = codes_of(lengths);
  lengths.fill(5);
  distances_ = codes_of(std::span(lengths).first(32));
}

// Section 3.2.7: the codes' lengths are in a code too, and run-length coded.
void Inflate::read_codes() {
  const size_t literals = bits_.take(5) + 257, distances = bits_.take(5) + 1, lengths_given = bits_.take(4) + 4;
  if (literals > 286 || distances > 30) throw Error("corrupt gzip: too many symbols");
  std::array<uint8_t, 19> lengths_of_lengths{};
  for (size_t i = 0; i < lengths_given; ++i) {
    lengths_of_lengths[order_of_lengths[i]] = static_cast<uint8_t>(bits_.take(3));
  }
  const Codes codes = codes_of(lengths_of_lengths);
  std::vector<uint8_t> lengths;
  while (lengths.size() < literals + distances) {
    const uint32_t given = symbol(codes);
    if (given < 16) {
      lengths.push_back(static_cast<uint8_t>(given));
      continue;
    }
    if (given == 16 && lengths.empty()) throw Error("corrupt gzip: nothing to repeat");
    const uint8_t repeated = given == 16 ? lengths.back() : 0;
    const uint32_t times = given == 16 ? 3 + bits_.take(2) : given == 17 ? 3 + bits_.take(3) : 11 + bits_.take(7);
    lengths.insert(lengths.end(), times, repeated);
  }
  if (lengths.size() > literals + distances) throw Error("corrupt gzip: too many code lengths");
  if (lengths[end_of_block] == 0) throw Error("corrupt gzip: a block has no end");
  literals_ = codes_of(std::span(lengths).first(literals));
  distances_ = codes_of(std::span(lengths).subspan(literals));
}

void Inflate::copy_stored() {
  for (; stored_ > 0 && end_ < kHistory + kAtOnce; --stored_) window_[end_++] = static_cast<uint8_t>(bits_.take(8));
  if (stored_ == 0) block_ = Block::none;
}

// Literals up to the next match, or to the block's end.
void Inflate::decode_symbols() {
  unsigned char* out = &window_[end_];
  unsigned char* const full = &window_[kHistory + kAtOnce];
  uint32_t literal = 0;
  while (out < full && (literal = symbol(literals_)) < end_of_block) *out++ = static_cast<unsigned char>(literal);
  end_ = static_cast<size_t>(out - window_.data());
  if (literal < end_of_block) return;
  if (literal == end_of_block) {
    block_ = Block::none;
    return;
  }
  const size_t kind = literal - end_of_block - 1;
  if (kind >= length_bases.size()) throw Error("corrupt gzip: an unknown length");
  const size_t length = length_bases[kind] + bits_.take(length_bits[kind]);
  const size_t far = symbol(distances_);
  if (far >= distance_bases.size()) throw Error("corrupt gzip: an unknown distance");
  const size_t distance = distance_bases[far] + bits_.take(distance_bits[far]);
  if (distance > end_) throw Error("corrupt gzip: a distance beyond the beginning");
  for (size_t i = 0; i < length; ++i, ++end_) window_[end_] = window_[end_ - distance];  // it may repeat itself
}

std::span<const unsigned char> Inflate::more() {
  if (end_ > kHistory) {
    std::copy(window_.begin() + static_cast<std::ptrdiff_t>(end_ - kHistory),
              window_.begin() + static_cast<std::ptrdiff_t>(end_), window_.begin());
    end_ = kHistory;
  }
  const size_t begin = end_;
  while (end_ < kHistory + kAtOnce) {
    if (block_ == Block::none) {
      if (is_last_) break;
      begin_block();
    } else if (block_ == Block::stored) {
      copy_stored();
    } else {
      decode_symbols();
    }
  }
  return std::span(window_).subspan(begin, end_ - begin);
}

}  // namespace lockstep::io
