#include "shared_generator.hpp"

#include <ATen/Context.h>

#include "comm/world.hpp"
#include "rank_place.hpp"

#include <mutex>

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

uint64_t shared_seed() {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard lock(generator.mutex());
  return generator.current_seed();
}

void keep_shared_seed(const Rank& rank) {
  comm::RankPlace::of(rank).world().shared_seed = shared_seed();
}

void warn_of_shared_seed(const Rank& rank) {
  comm::World& world = comm::RankPlace::of(rank).world();
  if (!rank.device().is_cpu() || world.ranks_here().size() == 1) return;
  if (shared_seed() == world.shared_seed || world.another_seed_seen.exchange(true)) return;
  comm::RankPlace::of(rank).warn(
      "torch::manual_seed was called by a rank of this process, and changed what all its ranks draw, in an order that "
      "is another one in each run. Call it in Rank::in_turn(), together with what draws; what a rank draws for itself "
      "can come from Rank::generator()");
}

void warn_of_shared_draws(const Rank& rank, const std::string& owner, const std::string& layer) {
  comm::World& world = comm::RankPlace::of(rank).world();
  if (layer.empty() || !rank.device().is_cpu() || world.ranks_here().size() == 1) return;
  if (world.shared_draws_seen.exchange(true)) return;
  comm::RankPlace::of(rank).warn(
      owner + ": " + layer +
      " draws from LibTorch's default generator, which all ranks of a process share, so that no run repeats another "
      "one. lockstep::Dropout (dropout.hpp) drops the same in every run, on any number of ranks");
}

}  // namespace lockstep
