// OneThread: gives the calling thread one intra-op thread while it lives.
#pragma once

#include <ATen/Parallel.h>

namespace lockstep {

class OneThread {
 public:
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread& operator=(OneThread&&) = delete;

 private:
  const int before_ = at::get_num_threads();
};

}  // namespace lockstep
