#include "rank_generators.hpp"

#include <ATen/Context.h>

#include <mutex>

#include "shared_seed.hpp"

namespace lockstep {

// Copies the device's default generator, which is LibTorch's way to get one for any device.
at::Generator generator_on(const c10::Device& device, uint64_t seed) {
  at::Generator shared = at::globalContext().defaultGenerator(device);
  at::Generator own = [&] {
    const std::lock_guard lock(shared.mutex());
    return shared.clone();
  }();
  own.set_current_seed(seed);
  return own;
}

at::Tensor generators_of_all_ranks(Rank& rank) {
  at::Generator generator = at::globalContext().defaultGenerator(rank.device());
  at::Tensor state;
  {
    const std::lock_guard lock(generator.mutex());
    state = generator.get_state().contiguous();
  }
  return rank.allgather(state.to(rank.device())).cpu();
}

void set_generator(Rank& rank, const at::Tensor& states) {
  rank.barrier();
  at::Generator generator = at::globalContext().defaultGenerator(rank.device());
  if (!rank.device().is_cpu() || rank.index_in_process() == 0) {
    {
      const std::lock_guard lock(generator.mutex());
      // The state of another kind of device has another length, and cannot go on here.
      if (generator.get_state().numel() == states.size(1)) generator.set_state(states[rank.index()].clone());
    }
    keep_shared_seed(rank);
  }
  rank.barrier();
}

}  // namespace lockstep
