// scramble: turns any number into one that looks random, by splitmix64's function.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace lockstep {

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // numbers that differ by it are scrambled independently
inline constexpr uint64_t kScramble[] = {0xbf58476d1ce4e5b9, 0x94d049bb133111eb};

constexpr uint64_t scramble(uint64_t z) {
  z = (z ^ (z >> 30)) * kScramble[0];
  z = (z ^ (z >> 27)) * kScramble[1];
  return z ^ (z >> 31);
}

// Makes one number from several. Numbers near each other give results that are unrelated in all bits.
constexpr uint64_t mix(std::initializer_list<uint64_t> numbers) {
  uint64_t mixed = 0;
  for (const uint64_t number : numbers) mixed = scramble(mixed + number + kGolden);
  return mixed;
}

}  // namespace lockstep
