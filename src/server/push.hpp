// A push: the gradients of one server's pieces as one row of bytes, and what a server needs to read it.
#pragma once

#include "key_shards.hpp"

#include <string>
#include <vector>

namespace lockstep::server {

// What a push holds of a piece: kWhole for all of it, or the number of its rows (their numbers, then their values).
constexpr int64_t kWhole = -1;
constexpr int64_t kNothing = -2;

struct Push {
  std::vector<int64_t> rows;  // by piece
  at::Tensor payload;         // uint8, on the gradients' device
};

// How many bytes the payload of such a push has.
int64_t payload_bytes(const KeyShard& shard, const std::vector<int64_t>& rows);

// `gradients` by parameter: undefined, dense or sparse. Every value of a sparse one is sent once.
Push pack(const KeyShard& shard, const std::vector<at::Tensor>& gradients);

// The gradients by piece: undefined, a view into the payload, or a sparse tensor of views into it.
std::vector<at::Tensor> unpack(const KeyShard& shard, const Push& push);

}  // namespace lockstep::server
