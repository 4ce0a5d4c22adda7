// MemoryWatch: finds tensors whose bits change while nothing writes there. It is for what a rank alone has, such
// as a pipeline's stage.
//
//   watch.note(tensors);         // behind an update
//   …
//   watch.check(tensors, rank);  // before the next one
//
// Used by its rank's thread. Cost of each call: one pass over the tensors, see tensor_hash.hpp; of check() a small
// allgather too.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

struct WatchedTensor {
  std::string name;
  at::Tensor values;
  // The version is another number when somebody has written there, as a forward may. Then the bits tell nothing.
  int64_t version = 0;
};

// Makes one with the version that LibTorch counts.
WatchedTensor watched(const std::string& name, const at::Tensor& tensor);

class MemoryWatch {
 public:
  void note(const std::vector<WatchedTensor>& tensors);
  void forget();
  bool has_notes() const { return has_notes_; }

  // Throws ReplicasDiffer on all ranks if one rank's tensors have changed since note(). The error names that rank; its
  // ranks() are empty if no rank's tensors are as noted. All ranks of the run must call it, each with the tensors that
  // it noted.
  void check(const std::vector<WatchedTensor>& tensors, Rank& rank) const;

 private:
  struct Note {
    int64_t hash, version;
  };
  std::string what_has_changed(const std::vector<WatchedTensor>& tensors) const;

  bool has_notes_ = false;  // true also after note() of no tensors
  std::map<std::string, Note> notes_;
};

}  // namespace lockstep
