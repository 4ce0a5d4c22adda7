#include "signature.hpp"

#include "comm/arguments.hpp"
#include "comm/purpose.hpp"
#include "comm/reduction.hpp"

namespace lockstep::comm {

std::string Signature::text() const {
  std::string text = name;
  if (peer >= 0) text += " rank " + std::to_string(peer);
  std::string details = reduction ? name_of(*reduction) : "";
  if (root >= 0) details += (details.empty() ? "root " : ", root ") + std::to_string(root);
  if (!details.empty()) text += "(" + details + ")";
  if (type == at::ScalarType::Undefined && parts.empty()) return text;
  return text + " of " + (parts.empty() ? describe(type, sizes) : parts) + (purpose.empty() ? "" : " for " + purpose);
}

Signature signature_of(const char* name, const at::Tensor& tensor) {
  return {
      .name = name, .type = tensor.scalar_type(), .sizes = c10::DimVector(tensor.sizes()), .purpose = Purpose::text()};
}

std::string call_text(const char* name, const at::Tensor& tensor, std::optional<c10d::ReduceOp::RedOpType> op, int root,
                      int peer) {
  Signature signature = signature_of(name, tensor);
  signature.reduction = op;
  signature.root = root;
  signature.peer = peer;
  return signature.text();
}

std::string alltoall_text() {
  return signature_of_agreed_parts("alltoall").text();
}

Signature signature_of_agreed_parts(const char* name) {
  const std::string* const parts = AgreedParts::current();
  return {.name = name, .parts = parts == nullptr ? "" : *parts, .purpose = Purpose::text()};
}

}  // namespace lockstep::comm
