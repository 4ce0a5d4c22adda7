// Makes a worker's messages to a server. A request has a fixed size; the server takes the requests of all workers in
// the order of arrival. If a request announces a push, the push follows from the same worker: the gradients of the
// server's slices as one row of bytes. The request has the numbers that a server needs to read them.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "key_shards.hpp"

#include <cstdint>
#include <vector>

namespace lockstep::server {

// A slice in a push is kWhole for all of it, kNothing, or a count of rows. Then the rows' numbers and values follow.
constexpr int64_t kWhole = -1;
constexpr int64_t kNothing = -2;

struct Push {
  std::vector<int64_t> rows;  // for each slice kWhole, kNothing, or the number of its rows
  at::Tensor payload;         // uint8, on the gradients' device
};

// Gives the number of bytes of such a push's payload.
int64_t payload_bytes(const KeyShard& shard, const std::vector<int64_t>& rows);

// Packs `gradients`, one per parameter: undefined, dense or sparse. Every value of a sparse one is sent once.
Push pack(const KeyShard& shard, const std::vector<at::Tensor>& gradients);

// Unpacks the gradients, one per slice: undefined, a view into the payload, or a sparse tensor of views into it.
std::vector<at::Tensor> unpack(const KeyShard& shard, const Push& push);

// Tags of messages, in a group of ranks that belongs to the parameter server alone. The server receives kRequestTag
// from any rank. Between processes a backend keeps the upper half of its tags for such messages.
constexpr int kRequestTag = 0x4000;
constexpr int kPayloadTag = 1;
constexpr int kReplyTag = 2;  // a shard's parameters
constexpr int kEndTag = 3;    // all workers are done

enum Asks : int64_t { kPush = 1, kPull = 2, kDone = 4 };  // may be combined

struct Request {
  int64_t asks = 0;
  std::vector<int64_t> rows = {};  // the rows of a push, by slice: see Push

  // Makes an empty message, int64 [1 + slices].
  static at::Tensor empty(size_t slices) { return at::empty({static_cast<int64_t>(slices) + 1}, at::kLong); }
  at::Tensor to_tensor(size_t slices) const {
    std::vector<int64_t> numbers{asks};
    numbers.insert(numbers.end(), rows.begin(), rows.end());
    numbers.resize(slices + 1);
    return at::tensor(numbers, at::kLong);
  }
  static Request from_tensor(const at::Tensor& tensor) {
    const auto* const numbers = tensor.const_data_ptr<int64_t>();
    return {numbers[0], {numbers + 1, numbers + tensor.numel()}};
  }
};

}  // namespace lockstep::server
