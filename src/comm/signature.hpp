// Signature: what must be equal in a call on all ranks that make it together, so that calls that differ are told.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <string>

namespace lockstep::comm {

// The part of a call that is equal on all ranks of a collective. Compared at every call, put into words only for an
// error.
struct Signature {
  const char* name = "";                                    // "allreduce"; a literal
  std::optional<c10d::ReduceOp::RedOpType> reduction = {};  // of reductions
  int root = -1;                                            // of broadcast and reduce
  int peer = -1;                                            // of messages
  at::ScalarType type = at::ScalarType::Undefined;          // Undefined: the call has no tensor
  c10::DimVector sizes = {};
  std::string parts = {};    // AgreedParts of what has no type and sizes here
  std::string purpose = {};  // "DataParallel's backward 3"; empty: the user's

  bool operator==(const Signature&) const = default;
  std::string text() const;  // "allreduce(sum) of float [2, 3]"
};

Signature signature_of(const char* name, const at::Tensor& tensor);

// The call in words, for backends that compare nothing else. An alltoall has the parts that all ranks have agreed on.
std::string call_text(const char* name, const at::Tensor& tensor, std::optional<c10d::ReduceOp::RedOpType> op = {},
                      int root = -1, int peer = -1);
std::string alltoall_text();

// A call of all ranks' AgreedParts.
Signature signature_of_agreed_parts(const char* name);

}  // namespace lockstep::comm
