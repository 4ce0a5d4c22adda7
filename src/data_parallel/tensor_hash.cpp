#include "tensor_hash.hpp"

#include "base/scramble.hpp"

#include <array>
#include <cstring>

namespace lockstep {

// Uses four lanes, so that one product need not wait for another.
int64_t tensor_hash(const at::Tensor& tensor) {
  const at::Tensor here = tensor.detach().cpu().contiguous();
  std::array<uint64_t, 4> lanes{kGolden, kGolden + 1, kGolden + 2, kGolden + 3};
  const auto add = [&](const std::array<uint64_t, 4>& block) {
    for (size_t i = 0; i < 4; ++i) {
      lanes[i] = (lanes[i] ^ block[i]) * kScramble[0];
      lanes[i] ^= lanes[i] >> 32;
    }
  };
  std::array<uint64_t, 4> block{};
  const auto* bytes = static_cast<const char*>(here.const_data_ptr());
  size_t left = here.nbytes();
  for (; left >= sizeof block; left -= sizeof block, bytes += sizeof block) {
    std::memcpy(block.data(), bytes, sizeof block);
    add(block);
  }
  block = {};
  if (left > 0) std::memcpy(block.data(), bytes, left);
  add(block);
  uint64_t hash = here.nbytes();
  for (const uint64_t lane : lanes) hash = scramble(hash ^ lane);
  return static_cast<int64_t>(hash);
}

}  // namespace lockstep
