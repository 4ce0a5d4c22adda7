// GradientSlots: a slot for each parameter, which has its gradient's place, and buckets of slots whose gradients travel
// together.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include "gradient_hook.hpp"
#include "grain_sums.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace lockstep {

struct GradientSlot {  // one parameter's place
  std::string name;
  at::Tensor parameter;
  at::ScalarType type = parameter.scalar_type();  // the parameter's type when the slot was made
  size_t bucket = 0;
  int64_t offset = 0;    // the slot's place in the bucket's flat memory
  at::Tensor view = {};  // the gradient's place in the bucket's memory, with the parameter's shape and strides
  bool ready = false;    // its gradient is there, in this backward
  bool had = false;      // this rank computed one; false: it stands for zeros
  bool used = false;     // some rank had one, when the ranks last told each other
  bool adds = false;     // the average is added to that of an earlier backward
  // By grains:
  size_t place = 0;                             // the slot's number in its bucket
  bool taken = false;                           // the open grain's gradient is added up
  std::optional<GradientFactors> factors = {};  // the factors of the open grain's gradient, in the place of .grad
  at::Tensor before = {};                       // the gradient to which the average is added
  std::unique_ptr<GradientHook> hook = {};

  void refuse_sparse(const std::string& owner) const;  // throws Error if its gradient is sparse
};

struct GradientSlots {
  struct Bucket {
    std::vector<size_t> slots = {};
    size_t missing = 0;                              // slots that are not ready yet
    bool posted = false;                             // the bucket is posted in this backward
    std::unique_ptr<at::RecordFunction> range = {};  // the bucket's range on a profiler's timeline
    // By grains:
    int64_t columns = 0;                   // the values in its flat memory, in equal slices of the ranks
    at::Tensor row = {};                   // free memory for its first sum; undefined: there is none
    std::unique_ptr<GrainSums> sums = {};  // null before the first grain
  };
  std::vector<GradientSlot> slots;
  std::unordered_map<const at::TensorImpl*, size_t> slot_of;  // the slot of each parameter
  std::vector<Bucket> buckets;
};

}  // namespace lockstep
