#include "comm/arguments.hpp"

#include <c10/util/StringUtil.h>
#include <lockstep/error.hpp>

namespace lockstep::comm {

using at::Tensor;
using Tensors = std::vector<Tensor>;

std::string describe(const Tensor& tensor) {
  return c10::str(tensor.dtype().name(), " ", tensor.sizes());
}

std::string describe(const Tensors& tensors) {
  std::string text = "[";
  for (const auto& tensor : tensors) text += (text.size() > 1 ? ", " : "") + describe(tensor);
  return text + "]";
}

void Arguments::refuse(const std::string& why) const {
  throw Error(rank_name_ + ": " + why);
}

void Arguments::check_tensor(const Tensor& tensor, const std::string& what) const {
  if (!tensor.defined()) refuse(what + " is an undefined tensor");
  if (tensor.layout() != at::kStrided) refuse(what + " is a sparse tensor; only dense ones can be exchanged");
  if (!tensor.is_cpu()) refuse(what + " lies on " + tensor.device().str() + "; move it to this rank's device, cpu");
}

const Tensor& Arguments::only(const Tensors& tensors, const std::string& operation) const {
  if (tensors.size() != 1) refuse(operation + " takes one tensor per rank, got " + std::to_string(tensors.size()));
  check_tensor(tensors[0], operation + "'s tensor");
  return tensors[0];
}

void Arguments::check_list(const Tensors& tensors, const std::string& what) const {
  if (static_cast<int>(tensors.size()) != world_size_) {
    refuse(what + " must be one tensor per rank, " + std::to_string(world_size_) + ", but are " +
           std::to_string(tensors.size()));
  }
  for (const auto& tensor : tensors) check_tensor(tensor, what);
}

void Arguments::check_alike(const std::vector<Tensors>& lists, const Tensor& one, const std::string& what,
                            const std::string& operation) const {
  if (lists.size() != 1) refuse(operation + " takes one list of tensors, got " + std::to_string(lists.size()));
  check_list(lists[0], operation + "'s " + what);
  for (const auto& tensor : lists[0]) {
    if (tensor.numel() == one.numel() && tensor.scalar_type() == one.scalar_type()) continue;
    refuse(operation + "'s " + what + " must each be like " + describe(one) + ", but are " + describe(lists[0]));
  }
}

void Arguments::check_whole(const Tensor& whole, const Tensor& part, const std::string& what,
                            const std::string& of_what) const {
  if (whole.numel() == part.numel() * world_size_ && whole.scalar_type() == part.scalar_type()) return;
  refuse(what + " must hold " + std::to_string(world_size_) + " " + of_what + " of " + describe(part) + ", but is " +
         describe(whole));
}

void Arguments::check_rank(int64_t rank, const std::string& what) const {
  if (rank >= 0 && rank < world_size_) return;
  refuse(c10::str(what, " is rank ", rank, ", but the ranks are 0 to ", world_size_ - 1));
}

void Arguments::check_peer(int peer, const std::string& operation) const {
  check_rank(peer, operation + "'s peer");
  if (peer == rank_) refuse(operation + ": a rank cannot exchange messages with itself");
}

void Arguments::check_op(const c10d::ReduceOp& op, const Tensor& tensor, const std::string& operation) const {
  if (op != c10d::ReduceOp::AVG || tensor.is_floating_point() || tensor.is_complex()) return;
  refuse(operation + "(avg) of " + describe(tensor) +
         ": an average of integers is not an integer; use sum, or a floating-point type");
}

Tensors Arguments::in_parts(const Tensor& flat, const Tensor& whole, const std::vector<int64_t>& sizes,
                            const std::string& what) const {
  const int64_t rows = whole.dim() == 0 ? 1 : whole.size(0);
  std::vector<int64_t> parts = sizes;
  if (parts.empty() && rows % world_size_ == 0) parts.assign(world_size_, rows / world_size_);
  int64_t sum = 0;
  for (const int64_t part : parts) sum += part;
  if (static_cast<int>(parts.size()) != world_size_ || sum != rows) {
    refuse(c10::str(what, " ", describe(whole), " cannot be cut into ", world_size_, " parts of sizes ",
                    c10::IntArrayRef(sizes)));
  }
  for (auto& part : parts) part *= rows == 0 ? 0 : flat.numel() / rows;
  return flat.split_with_sizes(parts, 0);
}

}  // namespace lockstep::comm
