// PowerSgdHook: gradients travel as products of two thin matrices.
//
//   lockstep::DataParallel net(MyNet(), rank, {.hook = std::make_shared<lockstep::PowerSgdHook>()});
//
// Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
// algorithms 1 and 2. A parameter's gradient is seen as a matrix M of n rows and m columns: the first dimension makes
// the rows, all others the columns. The remainder of earlier steps is added to M. The hook sends P = M Q and Q = M^T P
// in two allreduces: n r + m r values rather than n m. It takes P Q^T for the average. P is orthogonal, and each step's
// Q is the start of the next. What P Q^T leaves out of a rank's own M is kept, and added to the next gradient.
//
// Only the backward of one rank uses a hook. Cost beside the exchange: on each rank, four products of n m r
// multiplications and a QR of n x r per matrix. Memory: as much again as the gradients.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct PowerSgdOptions {
  int64_t rank = 4;            // r, but at most a matrix's shorter side; the authors take 1 to 4
  double min_compression = 1;  // a gradient that would not become smaller by more than this factor is sent whole
  uint64_t seed = 0;           // gives the first Q, together with the parameter's name; equal on all ranks
};

class PowerSgdHook : public CommunicationHook {
 public:
  // Throws Error for a rank below 1, or a min_compression that is negative or not a number.
  explicit PowerSgdHook(const PowerSgdOptions& options = {});

  // Vectors and numbers are averaged as they are, in the first allreduce. Gradients of 16 bits are computed and sent in
  // float32. Each rank computes P Q^T itself, so ranks on equal machines get equal bits.
  CommunicationHook::Round average(const GradientBucket& bucket, Rank& rank) override;

  // These give the hook's memory by the parameters' names, in the order of the names. It is empty before the first
  // backward. The tensors are the hook's own, not copies. Errors (n x m, like M) differ between ranks. Averages depend
  // only on their mean over the ranks, so a run may go on with other ranks whose errors have the same mean. Queries
  // (Q, m x r) are equal on all ranks.
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  NamedTensors errors() const;
  NamedTensors queries() const;

  // Goes on from the errors and queries of an earlier hook; they are copied to `device`. Throws Error if names differ,
  // or if a query does not fit its error or this hook's rank. If one does not fit a gradient, the first backward
  // throws.
  void load(const NamedTensors& errors, const NamedTensors& queries, const c10::Device& device);

 private:
  struct Memory {  // one parameter's memory
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
