// A push: the gradients of one server's pieces as one row of bytes, and the numbers that a server needs to read it.
#pragma once

#include "key_shards.hpp"

#include <string>
#include <vector>

namespace lockstep::server {

// A piece in a push: kWhole for all of it, kNothing, or the number of its rows (then their numbers and values follow).
constexpr int64_t kWhole = -1;
constexpr int64_t kNothing = -2;

struct Push {
  std::vector<int64_t> rows;  // for each piece kWhole, kNothing, or the number of its rows
  at::Tensor payload;         // uint8, on the gradients' device
};

// The number of bytes of such a push's payload.
int64_t payload_bytes(const KeyShard& shard, const std::vector<int64_t>& rows);

// Packs `gradients`, one per parameter: undefined, dense or sparse. Every value of a sparse one is sent once.
Push pack(const KeyShard& shard, const std::vector<at::Tensor>& gradients);

// Unpacks the gradients, one per piece: undefined, a view into the payload, or a sparse tensor of views into it.
std::vector<at::Tensor> unpack(const KeyShard& shard, const Push& push);

}  // namespace lockstep::server
