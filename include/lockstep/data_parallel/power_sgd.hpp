// PowerSgdHook: gradients travel as products of two thin matrices.
//
//   lockstep::DataParallel net(MyNet(), rank, {.hook = std::make_shared<lockstep::PowerSgdHook>()});
//
// Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
// algorithms 1 and 2. A parameter's gradient as a matrix M of n rows and m columns (all but the first dimension are the
// columns), plus what was left out before, is sent as P = M Q and Q = M^T P, n r + m r values of n m, in two
// allreduces; its average is taken to be P Q^T, with P orthogonal and each step's Q the next one's start. What P Q^T
// leaves out of a rank's own M is kept and added to the next gradient. Used by its rank's backward alone. Cost beside
// the exchange: on each rank four products of n m r multiplications and a QR of n x r per matrix; memory: as much again
// as the gradients.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct PowerSgdOptions {
  int64_t rank = 4;            // r, of every matrix whose sides are as long; the authors take 1 to 4
  double min_compression = 1;  // a gradient that would not become smaller by more than this factor is sent whole
  uint64_t seed = 0;           // of the first Q, together with the parameter's name; equal on all ranks
};

class PowerSgdHook : public CommunicationHook {
 public:
  // Throws Error: a rank below 1, a min_compression that is negative or not a number.
  explicit PowerSgdHook(const PowerSgdOptions& options = {});

  // Vectors and numbers are averaged as they are, in the first allreduce. Gradients of 16 bits are computed with and
  // sent in float32. Ranks on equal machines get equal bits: each computes P Q^T for itself.
  HookRound average(const GradientBucket& bucket, Rank& rank) override;

  // What it remembers, by the parameters' names, in the names' order; none before the first backward. The tensors are
  // the hook's own. Errors are a rank's own, m and n as M has them; only their mean over the ranks counts for what is
  // averaged, so a run may go on with other ranks that have the same mean. Queries (Q, m x r) are equal on all ranks.
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  NamedTensors errors() const;
  NamedTensors queries() const;

  // Goes on from what these two were; copied to `device`. Throws Error: names that differ between the two, a query that
  // does not fit its error or this hook's rank. What does not fit a gradient is an Error of the first backward.
  void load(const NamedTensors& errors, const NamedTensors& queries, const c10::Device& device);

 private:
  struct Memory {  // of one parameter
    at::Tensor error;
    at::Tensor query;
  };

  bool compresses(const at::Tensor& gradient) const;
  Memory& memory_of(const std::string& name, const at::Tensor& gradient, const Rank& rank);
  void check_loaded(const std::string& name, const Memory& memory) const;

  const PowerSgdOptions options_;
  std::map<std::string, Memory> memory_;
};

}  // namespace lockstep
