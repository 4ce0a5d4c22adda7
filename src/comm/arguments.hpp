// Arguments: checks the arguments of a rank's call, for every backend. Each check throws an Error that names the rank,
// the argument and what to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

// Gives "float [2, 3]"; for a list "[float [2, 3], float [1]]".
std::string describe(const at::Tensor& tensor);
std::string describe(const std::vector<at::Tensor>& tensors);

// Tells whether two contiguous tensors have memory in common. Ranks that change both would spoil each other's values.
bool share_memory(const at::Tensor& a, const at::Tensor& b);

class Arguments {
 public:
  Arguments(std::string rank_name, const c10::Device& device, int rank, int world_size)
      : rank_name_(std::move(rank_name)), device_(device), rank_(rank), world_size_(world_size) {}

  [[noreturn]] void refuse(const std::string& why) const;

  // Throws unless the tensor is dense and on the rank's device.
  void check_tensor(const at::Tensor& tensor, const std::string& what) const;
  const at::Tensor& only(const std::vector<at::Tensor>& tensors, const std::string& operation) const;
  void check_list(const std::vector<at::Tensor>& tensors, const std::string& what) const;
  // Throws unless `lists` is one list with one tensor per rank, each like `one`: check_alike(outputs, input,
  // "allgather", "output", "input").
  void check_alike(const std::vector<std::vector<at::Tensor>>& lists, const at::Tensor& one,
                   const std::string& operation, const std::string& what, const std::string& of_what) const;
  // Throws unless `whole` holds one tensor like `part` per rank: check_whole(output, input, "allgather", "output",
  // "input").
  void check_whole(const at::Tensor& whole, const at::Tensor& part, const std::string& operation,
                   const std::string& what, const std::string& of_what) const;
  int checked_rank(int64_t rank, const std::string& what) const;
  int checked_root(int64_t root, int64_t tensor, const std::string& operation) const;  // c10d's rootRank and rootTensor
  void check_peer(int peer, const std::string& operation) const;
  c10d::ReduceOp::RedOpType checked_op(const c10d::ReduceOp& op, const at::Tensor& tensor,
                                       const std::string& operation) const;

  // Gives each rank's number of elements of `whole` if `sizes` cut up its first dimension. No sizes mean equal ones.
  std::vector<int64_t> elements_of_parts(const at::Tensor& whole, const std::vector<int64_t>& sizes,
                                         const std::string& what) const;

 private:
  const std::string rank_name_;
  const c10::Device device_;
  const int rank_;
  const int world_size_;
};

}  // namespace lockstep::comm
