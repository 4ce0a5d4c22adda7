// DividedParameters: parameters of which each rank keeps one slice, and which are whole only while they are used, as
// with Sharded::parameters.
//
// A unit is a ShardedBucket. It is gathered when an operator is about to read one of its parameters, in forward or in
// backward (memory_on_demand.hpp), and given back when an operator reads another unit's.
//
//   1. Units are gathered in the order in which this rank's operators read them. So all ranks must compute the same
//      layers in the same order. A rank that does not is told so by the collective call, which names its unit.
//   2. Nothing is given back while an operator runs that was given parameters: its kernel may hold addresses.
//   3. The next unit is gathered ahead: the one that followed on the present two before. It is not if both together are
//      larger than the largest unit and a tenth of a rank's slices of parameters and gradients (or 128 KiB). So what is
//      whole stays small beside what is divided, also where units are large. All ranks decide alike.
//   4. What changes a gathered parameter in place (load_weights(), an embedding's max_norm) is seen by its version, and
//      kept in the slices.
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
  DividedParameters(const DividedParameters&) = delete;
  DividedParameters& operator=(const DividedParameters&) = delete;

  // Around an update of the slices.
  void put_away();
  void bring_back();

  // Gathers all units, until release(). They nest. hold() is a collective call.
  void hold();
  void release();

  // A failure within an operator reaches its caller as LibTorch's exception. This throws the failure itself, if there
  // was one.
  void rethrow_failure() const;

  // Nothing is gathered any more. Whoever reads a parameter that is not whole gets an exception that says `reason`.
  void end(const std::string& reason);

 private:
  static constexpr size_t kNone = SIZE_MAX;

  struct Unit {
    ShardedBucket parameters;
    at::Tensor memory = {};                    // into which it is gathered
    c10::intrusive_ptr<c10d::Work> work = {};  // that gathers it; null: nothing is under way
    bool whole = false;
    int64_t version = 0;  // of its parameters, when it was gathered
  };

  void before_operator(const std::vector<size_t>& units) noexcept override;
  void after_operator() noexcept override;

  // All of these under mutex_.
  void need(const std::vector<size_t>& units);
  void gather_ahead();
  void gather_all();
  void post(size_t unit);
  void complete(size_t unit);
  void drop(size_t unit);  // gives it back
  void drop_all();
  void refuse_all(const std::string& text);

  Rank rank_;
  const bool ahead_;
  size_t most_bytes_ = 0;  // of units that are whole or gathered ahead; see 3
  mutable std::mutex mutex_;
  std::vector<Unit> units_;
  std::vector<size_t> current_;  // units of the operators that ran last
  // What was gathered last, and before it; and which unit followed on such a pair, when it was last there.
  std::pair<size_t, size_t> latest_ = {kNone, kNone};
  std::map<std::pair<size_t, size_t>, size_t> followers_;
  int operators_ = 0;  // that run now, one inside the other
  int holds_ = 0;
  std::exception_ptr failure_;
  bool ended_ = false;
  std::optional<OperatorWatch> watch_;
};

}  // namespace lockstep
