// RowNumbers: lets a CUDA graph gather the batches of data that are on its GPU.
//
// The numbers of a batch's rows lie in a tensor that stays. Batches writes them there, by one copy, and gathers
// nothing. The recorded work gathers. Use it from the rank's thread.
#pragma once

#include <lockstep/data/data.hpp>

#include <cstdint>
#include <memory>

namespace lockstep {

class RowNumbers {
 public:
  // Is for batches of `global_size` samples over all partners.
  explicit RowNumbers(int64_t global_size) : global_size_(global_size) {}

  // Gives the numbers of full batches to `numbers`, if the data are on the partner's GPU and come in an order.
  static void give(Batches& batches, const std::shared_ptr<RowNumbers>& numbers);

  bool are_there() const { return numbers_.defined(); }

  // Gives the rows of the numbers, with the other fields of `like`.
  Batch gather(const Batch& like) const;

  // From now on full batches are not gathered any more: their tensors are those of `stand_in`.
  void stand_in_by(const Batch& stand_in) { stand_in_ = stand_in; }

 private:
  friend class Batches;
  void note(const at::Tensor& numbers);

  const int64_t global_size_;
  Dataset data_;
  at::Tensor numbers_;  // int64 [n]; undefined: there are none
  Batch stand_in_;      // x is undefined: there is none
};

}  // namespace lockstep
