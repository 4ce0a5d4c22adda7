#include <ATen/ops/zeros.h>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/profile/layer_profile.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "base/seconds_since.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_wait.hpp"

namespace lockstep {
namespace {

constexpr int64_t small_bytes = 1 << 10, large_bytes = 4 << 20;
constexpr int rounds = 5;
constexpr double seconds_per_round = 0.02;
// On the CPU a rank that waits in a pipeline for a message has slept, and wakes slowly.
constexpr double seconds_before_message = 1e-3;
constexpr int tag = 0;

// Measures the seconds of the fastest call. Call it on all ranks; all make as many calls, and rank 0's clock counts.
double seconds_of(Rank& rank, const std::function<void()>& call) {
  call();  // the first call makes connections and touches memory
  synchronize_users(rank);
  rank.barrier();
  auto start = std::chrono::steady_clock::now();
  call();
  synchronize_users(rank);
  at::Tensor count = at::zeros({1}, at::kLong);
  count[0] = std::clamp<int64_t>(std::llround(seconds_per_round / seconds_since(start)), 1, 1000);
  count = count.to(rank.device());
  rank.broadcast(count);
  const auto calls = count.item<int64_t>();
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < rounds; ++round) {
    rank.barrier();
    start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    synchronize_users(rank);
    best = std::min(best, seconds_since(start) / static_cast<double>(calls));
  }
  return best;
}

// Keeps this thread's core busy for `seconds`.
void compute(double seconds) {
  const double start = thread_seconds();
  while (thread_seconds() - start < seconds) {
  }
}

at::Tensor floats(int64_t bytes, const Rank& rank) {
  return at::zeros({bytes / 4}, at::TensorOptions(rank.device()).dtype(at::kFloat));
}

// Fits a link on which `steps` messages of `share` of the bytes take as long as was measured. Noise can hide the time
// of the bytes. Then all time counts as theirs, since a link without a limit would be taken for a fast one.
Link fitted(const std::function<double(int64_t bytes)>& seconds, double steps, double share) {
  const double measured = seconds(small_bytes), large = seconds(large_bytes);
  const double small = measured < large ? measured : 0;
  const double per_byte = (large - small) / static_cast<double>(large_bytes - small_bytes);
  Link link;
  if (per_byte > 0) link.bytes_per_second = steps * share / per_byte;
  link.latency = std::max(0.0, small - per_byte * small_bytes) / steps;
  return link;
}

// Fits a ring whose `phases` of ranks - 1 steps take as long as was measured, over all ranks and over pairs. Ranks of
// one process meet once, however many they are. This time does not grow with the steps: it is the start.
Link fitted_ring(Rank& all, Rank& pair, int phases, const std::function<double(Rank& group, int64_t bytes)>& seconds) {
  const int ranks = all.world_size();
  const int steps = phases * (ranks - 1);
  Link link = fitted([&](int64_t bytes) { return seconds(all, bytes); }, steps, 1.0 / ranks);
  if (ranks == 2) return link;
  const double of_all = steps * link.latency, of_pair = seconds(pair, small_bytes);
  link.latency = std::clamp((of_all - of_pair) / (steps - phases), 0.0, link.latency);
  link.start = of_all - steps * link.latency;
  return link;
}

Links measured_links(Rank& rank) {
  const int ranks = rank.world_size();
  Links links;
  if (ranks == 1) return links;
  Rank pair = rank.group(rank.index() / 2);
  links.allreduce = fitted_ring(rank, pair, 2, [&](Rank& group, int64_t bytes) {
    const at::Tensor tensor = floats(bytes, rank);
    return seconds_of(rank, [&] { group.allreduce(tensor); });
  });
  links.allgather = fitted_ring(rank, pair, 1, [&](Rank& group, int64_t bytes) {
    const int64_t part = bytes / group.world_size();
    std::vector<at::Tensor> input{floats(part, rank)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int r = 0; r < group.world_size(); ++r) outputs[0].push_back(floats(part, rank));
    return seconds_of(rank, [&] { group.backend().allgather(outputs, input, c10d::AllgatherOptions{})->wait(); });
  });
  // Messages go there and back between neighbours, all pairs at once, as in a pipeline. A last odd rank waits.
  const int other = rank.index() % 2 == 0 ? rank.index() + 1 : rank.index() - 1;
  const auto there_and_back = [&](int64_t bytes) {
    std::vector<at::Tensor> tensor{floats(bytes, rank)};
    auto& backend = rank.backend();
    const double before = rank.device().is_cpu() ? seconds_before_message : 0;
    const auto send = [&] {
      compute(before);
      backend.send(tensor, other, tag)->wait();
    };
    const auto receive = [&] { backend.recv(tensor, other, tag)->wait(); };
    const double seconds = seconds_of(rank, [&] {
      if (other == ranks) return;
      if (rank.index() < other) {
        send();
        receive();
      } else {
        receive();
        send();
      }
    });
    return std::max(0.0, seconds - 2 * before);  // subtracts the core's time only: having to wait for a core counts
  };
  links.send = fitted(there_and_back, /*steps=*/2, /*share=*/1);
  return links;
}

}  // namespace

Cluster measured_cluster(const ModelProfile& profile, Rank& rank) {
  Cluster cluster;
  cluster.devices.resize(static_cast<size_t>(rank.world_size()));
  cluster.devices_per_node = rank.world_size();
  for (size_t i = 0; i < cluster.devices.size() && i < profile.speeds.size(); ++i) {
    cluster.devices[i].speed = profile.speeds[i];
  }
  cluster.contention = profile.contention;
  cluster.overlap = rank.device().is_cpu() ? 0 : 1;

  const int64_t memory = rank.device().is_cpu() ? 0 : gpu_info(rank.device()).total_bytes;
  const at::Tensor of_ranks = of_all_ranks(rank, {memory});
  for (size_t i = 0; i < cluster.devices.size(); ++i) {
    cluster.devices[i].memory_bytes = static_cast<double>(of_ranks[static_cast<int64_t>(i)][0].item<int64_t>());
  }
  cluster.within = measured_links(rank);
  cluster.between = cluster.within;
  return cluster_from_json(shared_text(rank.index() == 0 ? to_json(cluster) : "", rank));
}

}  // namespace lockstep
