// SampleScope: tells the layers the samples that this thread computes. Layers like Dropout draw by the samples' places.
//
// DataParallel::loss() and SplitModel open a scope around forward. If you call forward yourself, open one by
// DataParallel::samples(). A scope belongs to its thread, hence to one rank. Scopes nest, and the innermost counts.
// Cost: an entry in a map for each layer that draws.
//
// Let a block that backward computes again, as activation checkpointing does, draw there what it drew in forward:
//
//   const lockstep::SampleScope::Kept kept = lockstep::SampleScope::keep();  // in forward, before the block
//   const lockstep::SampleScope scope(kept);                                 // in backward, around the block
#pragma once

#include <cstdint>
#include <map>

namespace lockstep {

class SampleScope {
 public:
  struct Place {
    uint64_t seed = 0;
    int64_t step = 0;
    int64_t batch = 0;   // the batch's number in the step, if gradients of several whole batches add up there
    int64_t first = 0;   // the first sample's place in the global batch; -1: not known
    int64_t size = 1;    // the number of samples
    bool again = false;  // computed beside the batch, for a comparison or as a stand-in: do not count its loss
  };

  // Numbers a layer's draw: by the other layers that drew before it in this scope, and by the layer's own draws.
  struct Draw {
    int64_t layer = 0;
    int64_t call = 0;
  };

  // Holds a scope's state at a moment. A scope that is opened with it goes on from there, on any thread of the rank.
  struct Kept {
    Place place = {};
    std::map<const void*, Draw> draws = {};  // the next draw of each layer
  };

  explicit SampleScope(const Place& place);
  explicit SampleScope(Kept kept);
  ~SampleScope();
  SampleScope& operator=(SampleScope&&) = delete;

  // Gives the calling thread's innermost scope, or null if there is none.
  static SampleScope* current();

  // Keeps the state of the innermost scope. If there is none, a Dropout in a scope opened with this state throws Error.
  static Kept keep();

  const Place& place() const { return state_.place; }
  Draw draw(const void* layer);

 private:
  Kept state_;
  SampleScope* const before_;
};

using SamplePlace [[deprecated("lockstep::SampleScope::Place")]] = SampleScope::Place;

}  // namespace lockstep
