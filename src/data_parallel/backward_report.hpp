// BackwardReport: what the ranks tell each other in each averaged backward, in one small allreduce. It tells which
// parameters had a gradient, how large the parts were, of which batch, and whether the networks are still equal.
// Reducer and ShardedReducer use it.
//
// Reading it costs nothing on the CPU. On a GPU the host would wait for the device. So there all but the parameters
// with a gradient is checked in the first backwards only, and these are read only by a rank that lacks one.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/ranks/rank.hpp>

#include "part_sizes.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class BackwardReport {
 public:
  // Errors begin with `name`. It says which rank this is, and what the user calls the object.
  BackwardReport(const Rank& rank, std::string name) : rank_(rank), name_(std::move(name)) {}

  // The size of the message, in numbers of eight bytes.
  static int64_t size(size_t parameters, int ranks) {
    return static_cast<int64_t>(parameters) + int64_t{kNumbers} * ranks;
  }

  // A parameter that must be equal on all ranks. Each backward takes another one.
  struct Compared {
    std::string name;
    at::Tensor values = {};  // undefined: there is none
  };

  // `had` says which parameters had a gradient here, in an order that all ranks share. All ranks must post a report at
  // the same place among their calls.
  void post(const std::vector<bool>& had, const PartSizes& sizes, const Compared& compared);

  // Waits for it. Throws Error, on all ranks, if the parts do not make up the batch or are of several batches, and if
  // the ranks' networks differ. Between processes that is a warning: their CPUs may be of different kinds.
  void wait();

  // Whether any rank had a gradient of this parameter.
  bool any_had(size_t parameter);

  const c10::intrusive_ptr<c10d::Work>& open() const { return work_; }  // posted, and not waited for; may be null

 private:
  static constexpr int kNumbers = 5;  // of a rank's part

  const int64_t* cells();  // on the host
  void check_sizes(const int64_t* parts) const;
  void check_marks(const int64_t* parts) const;
  bool reads_all() const;  // this backward's table
  int32_t digest_of(const at::Tensor& values) const;
  void check_networks(const int64_t* parts);

  Rank rank_;
  const std::string name_;
  size_t parameters_ = 0;
  at::Tensor table_, on_host_;  // a number for each parameter, and five for each rank
  c10::intrusive_ptr<c10d::Work> work_;
  int checked_ = 0;     // backwards
  int64_t posted_ = 0;  // backwards
  std::string compared_;
  bool has_warned_ = false;
};

}  // namespace lockstep
