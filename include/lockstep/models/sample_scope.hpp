// SampleScope: tells the layers which samples this thread computes. Layers like Dropout draw by the samples' places.
//
// DataParallel::loss() and Pipeline open one around forward; who calls forward alone opens one by
// DataParallel::samples(). Per thread, hence per rank; scopes nest, and the innermost counts. Cost: an entry in a map
// for each layer that draws.
#pragma once

#include <cstdint>
#include <map>

namespace lockstep {

struct SamplePlace {
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t batch = 0;  // of several whole ones whose gradients add up in the step
  int64_t first = 0;  // place of the first sample in the global batch; -1: not known
  int64_t size = 1;   // samples
};

class SampleScope {
 public:
  explicit SampleScope(const SamplePlace& place);
  ~SampleScope();
  SampleScope(const SampleScope&) = delete;
  SampleScope& operator=(const SampleScope&) = delete;

  // The calling thread's innermost; null if there is none.
  static SampleScope* current();

  const SamplePlace& place() const { return place_; }

  // For layers that draw: how many other layers drew before it in this scope, and how often it did itself.
  struct Draw {
    int64_t layer = 0;
    int64_t call = 0;
  };
  Draw draw(const void* layer);

 private:
  const SamplePlace place_;
  SampleScope* const before_;
  std::map<const void*, Draw> draws_;  // the next one's
};

}  // namespace lockstep
