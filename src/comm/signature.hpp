// A Signature has the properties of a call that must be equal on all ranks that make it together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <string>

namespace lockstep::comm {

// It is compared at every call, but put into words only for an error.
struct Signature {
  const char* name = "";                                    // "allreduce"; a literal
  std::optional<c10d::ReduceOp::RedOpType> reduction = {};  // the operation of a reduction
  int root = -1;                                            // the root of a broadcast or a reduce
  int peer = -1;                                            // the peer of a message
  at::ScalarType type = at::ScalarType::Undefined;          // Undefined: the call has no tensor
  c10::DimVector sizes = {};
  std::string parts = {};    // AgreedParts, for a call without type and sizes
  std::string purpose = {};  // "DataParallel's backward 3"; empty: a call of the user's

  bool operator==(const Signature&) const = default;
  std::string text() const;  // gives "allreduce(sum) of float [2, 3]"
};

Signature signature_of(const char* name, const at::Tensor& tensor);

// Gives the call in words, for backends that compare nothing else. An alltoall's words have the parts that all ranks
// agreed on.
std::string call_text(const char* name, const at::Tensor& tensor, std::optional<c10d::ReduceOp::RedOpType> op = {},
                      int root = -1, int peer = -1);
std::string alltoall_text();

// Gives the signature of a call whose parts AgreedParts decide.
Signature signature_of_agreed_parts(const char* name);

}  // namespace lockstep::comm
