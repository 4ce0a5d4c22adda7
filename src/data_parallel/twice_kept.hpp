// TwiceKept: what an elastic job does with a ShardedOptimizer whose slices are kept twice (ShardedOptions::keep_twice).
//
// A step is in two parts, between which the ranks agree that all have come so far. prepare() makes all that the update
// of a rank's slices needs; the update then needs no other rank.
//   1. If one rank updates, all were prepared. So whoever did not hear that all agreed can still update alone.
//   2. The parameters of other slices are right again only once all have gathered them. Until then those of its own
//      slices are right, and they are what pieces() gives.
// Used by the rank's thread.
#pragma once

#include <lockstep/data_parallel/sharded_optimizer.hpp>

#include <cstdint>
#include <vector>

#include "io/safetensors.hpp"
#include "sharded_state.hpp"
#include "state_piece.hpp"

namespace lockstep {

class TwiceKept {
 public:
  explicit TwiceKept(ShardedOptimizer& optimizer) : optimizer_(optimizer) {}

  void prepare() { optimizer_.prepare(); }  // all ranks must call it, before step()
  bool is_prepared() const { return optimizer_.prepared_; }
  void update_alone() { optimizer_.update(); }  // step() for this rank's slices, without the others

  // Whether this rank has updated since begin_step(). If so, all ranks have agreed on the step.
  void begin_step() { before_ = updates(); }
  bool has_updated() const { return updates() > before_; }

  // How many updates there have been; a later optimizer goes on from a number.
  int64_t updates() const { return optimizer_.updates_; }
  void set_updates(int64_t updates) { optimizer_.updates_ = updates; }

  SliceHashes hashes() const { return slice_hashes(*optimizer_.optimizer_, optimizer_.buckets_); }

  // Copies of what this rank has and keeps of the optimizer's state, under "PREFIX.MEMBER.PARAMETER"; and of those of
  // `tensors` that are parameters of the optimizer, which are then no longer in `tensors`.
  std::vector<StatePiece> pieces(const std::string& prefix, io::NamedTensors& tensors) const;

 private:
  ShardedOptimizer& optimizer_;
  int64_t before_ = 0;
};

}  // namespace lockstep
