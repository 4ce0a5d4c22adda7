// What a rank's call must bring: each check throws an Error that names the rank, the argument and what to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

// "float [2, 3]"; of a list "[float [2, 3], float [1]]".
std::string describe(const at::Tensor& tensor);
std::string describe(const std::vector<at::Tensor>& tensors);

class Arguments {
 public:
  Arguments(std::string rank_name, int rank, int world_size)
      : rank_name_(std::move(rank_name)), rank_(rank), world_size_(world_size) {}

  [[noreturn]] void refuse(const std::string& why) const;

  void check_tensor(const at::Tensor& tensor, const std::string& what) const;  // dense, on the CPU
  const at::Tensor& only(const std::vector<at::Tensor>& tensors, const std::string& operation) const;
  void check_list(const std::vector<at::Tensor>& tensors, const std::string& what) const;
  // Every tensor of the list, one per rank, is like `one`.
  void check_alike(const std::vector<std::vector<at::Tensor>>& lists, const at::Tensor& one, const std::string& what,
                   const std::string& operation) const;
  // `whole` holds one tensor like `part` per rank.
  void check_whole(const at::Tensor& whole, const at::Tensor& part, const std::string& what,
                   const std::string& of_what) const;
  void check_rank(int64_t rank, const std::string& what) const;
  void check_peer(int peer, const std::string& operation) const;
  void check_op(const c10d::ReduceOp& op, const at::Tensor& tensor, const std::string& operation) const;

  // One part per rank along the first dimension of `whole`, of which `flat` is the memory; no sizes mean equal ones.
  std::vector<at::Tensor> in_parts(const at::Tensor& flat, const at::Tensor& whole, const std::vector<int64_t>& sizes,
                                   const std::string& what) const;

 private:
  const std::string rank_name_;
  const int rank_;
  const int world_size_;
};

}  // namespace lockstep::comm
