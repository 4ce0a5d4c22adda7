// BackwardReport: what the ranks tell each other in each averaged backward, in one small allreduce. It tells the
// parameters with a gradient, the sizes of the parts, the batch, which parameters are frozen, and whether the networks
// are still equal. Reducer and ShardedReducer use it.
//
// Reading the report costs nothing on the CPU; on a GPU the host waits. So on a GPU sizes, batches and networks are
// checked in the first backwards only, and a rank reads who had gradients only if it lacks one.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/ranks/rank.hpp>

#include "gradient_slots.hpp"
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

  // Gives the size of the message, in numbers of eight bytes.
  static int64_t size(size_t parameters, int ranks) {
    return static_cast<int64_t>(parameters) + int64_t{kNumbers} * ranks;
  }

  // The slots are in an order that all ranks share. The values of the parameter `compared` should be equal on all
  // ranks; give another one in each backward, or null, and keep it until wait(). Post a report on all ranks, at the
  // same place among their calls.
  void post(const std::vector<GradientSlot>& slots, const PartSizes& sizes, const GradientSlot* compared);

  // Waits for the report. Throws Error, on all ranks, if the parts do not make up the batch or are of several batches,
  // if the ranks have frozen different parameters, and if their networks differ. Between processes a difference is a
  // warning: their CPUs may be of different kinds.
  void wait();
  void check_own(const PartSizes& sizes) const;  // checks the sizes of a single rank, which posts no report

  // Tells whether any rank had a gradient of this parameter.
  bool any_had(size_t parameter);

  const c10::intrusive_ptr<c10d::Work>& open() const { return work_; }  // the report under way; may be null

 private:
  static constexpr int kNumbers = 6;  // numbers that tell about one rank's part

  const int64_t* cells();  // gives the table on the host
  void check_sizes(const int64_t* parts) const;
  void check_marks(const int64_t* parts) const;
  void check_frozen(const int64_t* parts) const;
  bool reads_all() const;  // tells whether this backward's table is read whole
  int32_t digest() const;  // hashes a few of the compared parameter's values
  void check_networks(const int64_t* parts);

  Rank rank_;
  const std::string name_;
  size_t parameters_ = 0;
  at::Tensor on_host_;  // a number for each parameter, and kNumbers for each rank
  at::Tensor table_;    // the same on the device; on a CPU the same tensor
  c10::intrusive_ptr<c10d::Work> work_;
  int checked_ = 0;     // the number of backwards checked, since one of the first changes of frozen_
  int64_t frozen_ = 0;  // a hash of what is frozen
  int changes_ = 0;     // how often frozen_ has changed
  int64_t posted_ = 0;  // the number of backwards posted
  const GradientSlot* compared_ = nullptr;
  bool has_warned_ = false;
};

}  // namespace lockstep
