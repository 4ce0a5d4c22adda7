#include "sha256.hpp"

#include <algorithm>
#include <bit>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace lockstep::io {
namespace {

constexpr size_t sha_block = 64;

// The fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr std::array<uint32_t, 64> sha_constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian_at(const unsigned char* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

// FIPS 180-4, section 6.2.2, with its names.
void plain_blocks(Sha256::State& state, const unsigned char* bytes, size_t count) {
  for (; count > 0; --count, bytes += sha_block) {
    std::array<uint32_t, 64> w;
    for (size_t t = 0; t < 16; ++t) w[t] = big_endian_at(bytes + 4 * t);
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + sha_constants[t] + w[t];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const Sha256::State after = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state.size(); ++i) state[i] += after[i];
  }
}

#if defined(__x86_64__)

bool has_sha_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_sse41 = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 19 & 1) != 0;
  return has_sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
}

__m128i loaded(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

// Intel, "Intel SHA Extensions", 2013: the state is kept as the words ABEF and CDGH, an instruction makes two rounds.
__attribute__((target("sha,sse4.1,ssse3"))) void sha_instruction_blocks(Sha256::State& state,
                                                                        const unsigned char* bytes, size_t count) {
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  const __m128i cdab = _mm_shuffle_epi32(loaded(&state[0]), 0xb1), efgh = _mm_shuffle_epi32(loaded(&state[4]), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; count > 0; --count, bytes += sha_block) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];
    for (size_t i = 0; i < 4; ++i) words[i] = _mm_shuffle_epi8(loaded(bytes + 16 * i), to_big_endian);
    for (size_t i = 0; i < 16; ++i) {  // four rounds, with the words 4 i … 4 i + 3
      const __m128i sums = _mm_add_epi32(words[i % 4], loaded(&sha_constants[4 * i]));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sums, 0x0e));
      const __m128i third = words[(i + 2) % 4], fourth = words[(i + 3) % 4];
      const __m128i begun = _mm_sha256msg1_epu32(words[i % 4], words[(i + 1) % 4]);
      words[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(begun, _mm_alignr_epi8(fourth, third, 4)), fourth);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[0]), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&state[4]), _mm_alignr_epi8(dchg, feba, 8));
}

#endif

}  // namespace

Sha256::Blocks Sha256::in_plain_code() {
  return plain_blocks;
}

Sha256::Blocks Sha256::fastest() {
#if defined(__x86_64__)
  static const bool has_instructions = has_sha_instructions();
  if (has_instructions) return sha_instruction_blocks;
#endif
  return plain_blocks;
}

void Sha256::update(const void* data, size_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  const size_t kept = size_ % sha_block;
  size_ += bytes;
  if (kept > 0) {
    const size_t taken = std::min(bytes, sha_block - kept);
    std::copy_n(next, taken, rest_.begin() + static_cast<std::ptrdiff_t>(kept));
    if (kept + taken < sha_block) return;
    blocks_(state_, rest_.data(), 1);
    next += taken, bytes -= taken;
  }
  blocks_(state_, next, bytes / sha_block);
  std::copy_n(next + bytes / sha_block * sha_block, bytes % sha_block, rest_.begin());
}

std::string Sha256::bytes() {
  const uint64_t bits = size_ * 8;
  std::string end(1, '\x80');  // the padding: a one, zeros, and the number of bits
  end.resize(1 + (sha_block + 55 - size_ % sha_block) % sha_block, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) end += static_cast<char>(bits >> shift & 0xff);
  update(end);
  std::string result;
  for (const uint32_t word : state_) {
    for (int shift = 24; shift >= 0; shift -= 8) result += static_cast<char>(word >> shift & 0xff);
  }
  return result;
}

std::string Sha256::hex() {
  std::string text;
  for (const char byte : bytes()) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[byte >> shift & 15];
  }
  return text;
}

std::string hmac_sha256(const std::string& key, const std::string& text) {
  const auto hashed = [](const std::string& first, const std::string& second) {
    Sha256 sha;
    sha.update(first);
    sha.update(second);
    return sha.bytes();
  };
  std::string padded = key.size() > sha_block ? hashed(key, "") : key;
  padded.resize(sha_block, '\0');
  std::string inner = padded, outer = padded;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  return hashed(outer, hashed(inner, text));
}

}  // namespace lockstep::io
