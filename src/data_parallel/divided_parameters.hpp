// DividedParameters: parameters of which each rank keeps one slice, and which are whole only while they are used, as
// with Sharded::parameters.
//
// A unit is a ShardedBucket. It is gathered when an operator of forward or backward is about to read a parameter of the
// unit (memory_on_demand.hpp). It is given back when an operator reads another unit's.
//
//   1. Units are gathered in the order in which this rank's operators read them. So compute the same
//      layers in the same order on all ranks. The collective call tells a rank that does not, and names its unit.
//   2. Nothing is given back while an operator runs that was given parameters: its kernel may hold addresses.
//   3. The next unit is gathered ahead: the one that came last time after the latest two. It is not if that unit and
//      the present ones are larger than the largest unit and a tenth of a rank's slices of parameters and gradients (or
//      128 KiB). So whole units stay small beside the slices, also where units are large. All ranks decide alike.
//   4. Changes of a gathered parameter in place (by load_weights(), or an embedding's max_norm) show in its version,
//      and are kept in the slices.
//   5. Callbacks run on the thread that computes, on GPUs autograd's, everything else on the rank's. mutex_ guards all.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include "memory_on_demand.hpp"
#include "sharded_parameters.hpp"

#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class DividedParameters : private MemoryFiller {
 public:
  // `units` have slices of their own. From here on only these are in memory. With `ahead` the next unit is gathered
  // while the present one computes.
  DividedParameters(std::vector<ShardedBucket> units, const Rank& rank, bool ahead);
  ~DividedParameters() override;
  DividedParameters& operator=(DividedParameters&&) = delete;

  // Call put_away() before an update of the slices, and bring_back() after it.
  void put_away();
  void bring_back();

  // Gathers all units, until release(). Calls of hold() nest. Call hold() on all ranks.
  void hold();
  void release();

  // Throws the failure of a gather, if there was one. Its operator's caller got LibTorch's exception instead.
  void rethrow_failure() const;

  // Ends all gathering. Whoever reads a parameter that is not whole gets an exception that says `reason`.
  void end(const std::string& reason);

 private:
  static constexpr size_t kNone = SIZE_MAX;

  struct Unit {
    ShardedBucket parameters;
    at::Tensor memory = {};                    // the memory into which the unit is gathered
    c10::intrusive_ptr<c10d::Work> work = {};  // the call that gathers the unit; null: none is under way
    bool whole = false;
    int64_t version = 0;  // the parameters' version when the unit was gathered
  };

  void before_operator(const std::vector<size_t>& units) noexcept override;
  void after_operator() noexcept override;

  // Call these functions under mutex_.
  void need(const std::vector<size_t>& units);
  void gather_ahead();
  void gather_all();
  void post(size_t unit);
  void complete(size_t unit);
  void drop(size_t unit);  // gives the unit's memory back
  void drop_all();
  void refuse_all(const std::string& text);

  Rank rank_;
  const bool ahead_;
  size_t most_bytes_ = 0;  // the most bytes of units whole or gathered ahead; see 3
  mutable std::mutex mutex_;
  std::vector<Unit> units_;
  std::vector<size_t> current_;  // the units that the last operators read
  // The two units gathered last, and for each such pair the unit that came next the last time.
  std::pair<size_t, size_t> latest_ = {kNone, kNone};
  std::map<std::pair<size_t, size_t>, size_t> followers_;
  int operators_ = 0;  // the number of operators that run now, one inside the other
  int holds_ = 0;
  std::exception_ptr failure_;
  bool ended_ = false;
  std::optional<OperatorWatch> watch_;
};

}  // namespace lockstep
