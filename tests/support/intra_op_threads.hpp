// IntraOpThreads: as long as it lives, LibTorch computes an operator with so many threads.
#pragma once

#include <ATen/Parallel.h>

namespace lockstep {

class IntraOpThreads {
 public:
  explicit IntraOpThreads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~IntraOpThreads() { at::set_num_threads(before_); }
  IntraOpThreads(const IntraOpThreads&) = delete;
  IntraOpThreads& operator=(const IntraOpThreads&) = delete;

 private:
  const int before_;
};

}  // namespace lockstep
