#include "arguments.hpp"

#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "reduction.hpp"

namespace lockstep::comm {

using at::Tensor;
using Tensors = std::vector<Tensor>;

std::string describe(const Tensor& tensor) {
  return describe(tensor.scalar_type(), tensor.sizes());
}

std::string describe(const Tensors& tensors) {
  std::string text = "[";
  for (const auto& tensor : tensors) text += (text.size() > 1 ? ", " : "") + describe(tensor);
  return text + "]";
}

bool share_memory(const Tensor& a, const Tensor& b) {
  const auto *a_begin = static_cast<const char*>(a.const_data_ptr()), *a_end = a_begin + a.nbytes();
  const auto *b_begin = static_cast<const char*>(b.const_data_ptr()), *b_end = b_begin + b.nbytes();
  return a.device() == b.device() && a_begin < b_end && b_begin < a_end;
}

void Arguments::refuse(const std::string& why) const {
  throw Error(rank_name_ + ": " + why);
}

void Arguments::check_tensor(const Tensor& tensor, const std::string& what) const {
  if (!tensor.defined()) refuse(what + " is an undefined tensor");
  if (tensor.layout() != at::kStrided) refuse(what + " is a sparse tensor; only dense ones can be exchanged");
  if (tensor.device() != device_)
    refuse(what + " lies on " + tensor.device().str() + "; move it to this rank's device, " + device_.str());
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

void Arguments::check_alike(const std::vector<Tensors>& lists, const Tensor& one, const std::string& operation,
                            const std::string& what, const std::string& of_what) const {
  if (lists.size() != 1)
    refuse(operation + " takes one list of " + what + " tensors, got " + std::to_string(lists.size()));
  check_list(lists[0], operation + "'s " + what + "s");
  for (const auto& tensor : lists[0]) {
    if (tensor.sizes() == one.sizes() && tensor.scalar_type() == one.scalar_type()) continue;
    refuse(operation + "'s " + what + "s must each be like its " + of_what + ", " + describe(one) + ", but are " +
           describe(lists[0]));
  }
}

void Arguments::check_whole(const Tensor& whole, const Tensor& part, const std::string& operation,
                            const std::string& what, const std::string& of_what) const {
  if (whole.numel() == part.numel() * world_size_ && whole.scalar_type() == part.scalar_type()) return;
  refuse(operation + "'s " + what + " must hold " + std::to_string(world_size_) + " " + of_what + "s of " +
         describe(part) + ", but is " + describe(whole));
}

int Arguments::checked_rank(int64_t rank, const std::string& what) const {
  if (rank < 0 || rank >= world_size_)
    refuse(classic_text(what, " is rank ", rank, ", but the ranks are 0 to ", world_size_ - 1));
  return static_cast<int>(rank);
}

int Arguments::checked_root(int64_t root, int64_t tensor, const std::string& operation) const {
  if (tensor != 0) {
    refuse(classic_text(operation, "'s rootTensor is ", tensor, ", but each rank has one tensor: give rootRank alone"));
  }
  return checked_rank(root, operation + "'s root");
}

void Arguments::check_peer(int peer, const std::string& operation) const {
  checked_rank(peer, operation + "'s peer");
  if (peer == rank_) refuse(operation + ": a rank cannot exchange messages with itself");
}

c10d::ReduceOp::RedOpType Arguments::checked_op(const c10d::ReduceOp& op, const Tensor& tensor,
                                                const std::string& operation) const {
  const c10d::ReduceOp::RedOpType type = op;
  if (!is_offered(type)) {
    refuse(operation + "(" + name_of(type) + ") of " + describe(tensor) +
           " is not offered: the reduction must be sum, avg, product, min or max");
  }
  if (type == c10d::ReduceOp::AVG && !tensor.is_floating_point() && !tensor.is_complex()) {
    refuse(operation + "(avg) of " + describe(tensor) +
           ": an average of integers is not an integer; use sum, or a floating-point type");
  }
  return type;
}

std::vector<int64_t> Arguments::elements_of_parts(const Tensor& whole, const std::vector<int64_t>& sizes,
                                                  const std::string& what) const {
  const int64_t rows = whole.dim() == 0 ? 1 : whole.size(0);
  std::vector<int64_t> parts = sizes;
  if (parts.empty() && rows % world_size_ == 0) parts.assign(world_size_, rows / world_size_);
  int64_t sum = 0;
  for (const int64_t part : parts) sum += part;
  if (static_cast<int>(parts.size()) != world_size_ || sum != rows) {
    refuse(classic_text(what, " ", describe(whole), " cannot be cut into ", world_size_, " parts of sizes ",
                        c10::IntArrayRef(sizes)));
  }
  for (auto& part : parts) part *= rows == 0 ? 0 : whole.numel() / rows;
  return parts;
}

}  // namespace lockstep::comm
