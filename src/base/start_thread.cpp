#include "start_thread.hpp"

#include <mutex>
#include <vector>

namespace lockstep {

void check_that_threads_start(int count) {
  std::mutex gate;
  std::vector<std::jthread> threads;
  const std::lock_guard closed(gate);  // the gate opens before the threads are joined
  for (int i = 0; i < count; ++i) {
    threads.push_back(start_thread<std::jthread>([&] { const std::lock_guard passes(gate); }));
  }
}

}  // namespace lockstep
