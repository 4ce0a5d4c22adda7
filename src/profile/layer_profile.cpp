#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/tied_linear.hpp>
#include <lockstep/plan/plan.hpp>
#include <lockstep/profile/layer_profile.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "base/seconds_since.hpp"
#include "echo_backend.hpp"
#include "layer_meter.hpp"
#include "optim/fused_optimizers.hpp"
#include "ranks/gather.hpp"
#include "tensor_parallel/shard.hpp"

namespace lockstep {
namespace {

using torch::nn::Sequential;

constexpr double seconds_of_load = 0.1;  // seconds that ranks compute at a time to compare their speeds
constexpr double longest_step = 0.05;    // the most seconds of the step by which ranks compare, if it can be so short
constexpr int64_t fewest_steps = 3;
constexpr double same_speed = 0.1;  // a smaller difference is the machine's noise
constexpr int rounds_of_load = 10;

std::vector<std::string> names_of(const Sequential& net) {
  std::vector<std::string> names;
  for (const auto& item : net->named_children()) names.push_back(item.key());
  return names;
}

Sequential clone_of(const Sequential& net, c10::Device device) {
  try {
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone(device));
    tie_layers(*copy);
    return Sequential(copy);
  } catch (const c10::Error& error) {
    throw Error(std::string("profile: the net cannot be cloned, and measuring must not change it: ") +
                error.what_without_backtrace());
  }
}

void check(const Sequential& net, const Batch& sample, const ProfileOptions& options) {
  if (net.is_empty() || net->is_empty()) throw Error("profile: the net has no layers");
  if (!sample.x.defined() || !sample.y.defined() || sample.x.dim() == 0 || sample.size() == 0) {
    throw Error("profile: the sample batch is empty");
  }
  if (!(options.seconds >= 0)) throw Error("profile: options.seconds must be at least 0");
  for (const int ranks : options.tensor_ranks) {
    if (ranks < 2) throw Error("profile: tensor_ranks has " + std::to_string(ranks) + "; they must be at least 2");
  }
}

// Measures the slices of the group's first rank. No other rank's slice is larger.
std::vector<SlicedLayers> slices_of(const Sequential& net, const Batch& sample, const Criterion& criterion,
                                    const Rank& rank, const ProfileOptions& options) {
  std::vector<SlicedLayers> sliced;
  auto counts = options.tensor_ranks;
  std::sort(counts.begin(), counts.end());
  for (const int ranks : counts) {
    const auto echo = c10::make_intrusive<EchoBackend>(/*rank=*/0, ranks);
    Rank first = rank.wrapped([&](const auto&) { return echo; });
    Sequential slice;
    try {
      slice = shard(net, first);
    } catch (const Error&) {
      continue;  // the net's channels do not split into so many slices
    }
    auto layers = LayerMeter(slice, names_of(net), sample, criterion, echo).measure(options.seconds);
    layers.pop_back();  // removes the criterion
    sliced.push_back({ranks, std::move(layers)});
  }
  return sliced;
}

double update_seconds(const Sequential& net) {
  const auto parameters = net->parameters();
  if (parameters.empty()) return 0;
  FusedSgd sgd(parameters, /*lr=*/0);
  const auto device = parameters[0].device();
  double best = std::numeric_limits<double>::infinity();
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < 3 || (round < 50 && seconds_since(begin) < seconds_of_load); ++round) {
    synchronize(device);
    const auto start = std::chrono::steady_clock::now();
    zero_gradients(parameters);
    sgd.step();
    synchronize(device);
    best = std::min(best, seconds_since(start));
  }
  return best;
}

// Compares the ranks' speeds: each alone, and several at once.
class Load {
 public:
  Load(LayerMeter& meter, Rank& rank, const std::vector<LayerProfile>& layers, int64_t most_samples)
      : meter_(meter), rank_(rank) {
    at::Tensor choice = at::zeros({2}, at::kLong);
    if (rank.index() == 0) {
      int64_t samples = std::max<int64_t>(1, most_samples / rank.world_size());
      const auto seconds = [&](int64_t n) {
        double sum = 0;
        for (const auto& layer : layers) {
          sum += layer.forward.at(static_cast<double>(n)) + layer.backward.at(static_cast<double>(n));
        }
        return sum;
      };
      const int64_t fewest = layers[0].forward.points[0].samples;
      while (samples / 2 >= fewest && seconds(samples) > longest_step) samples /= 2;
      samples = std::max(samples, fewest);
      choice[0] = samples;
      choice[1] = std::max<int64_t>(fewest_steps, std::llround(seconds_of_load / seconds(samples)));
    }
    choice = choice.to(rank.device());
    rank.broadcast(choice);
    choice = choice.cpu();
    samples_ = choice[0].item<int64_t>();
    steps_ = choice[1].item<int64_t>();
    meter_.step(samples_);
  }

  // Measures each rank alone, and several at once, in turns. So a disturbance of a second cannot spoil all rounds of
  // one case.
  void measure() {
    for (int r = 0; r < rank_.world_size(); ++r) cases_.push_back({r, r + 1});
    for (int count = 2; count <= rank_.world_size();) {
      cases_.push_back({0, count});
      if (count == rank_.world_size()) break;
      count = std::min(count < 4 ? count + 1 : 2 * count, rank_.world_size());
    }
    for (int round = 0; round < rounds_of_load; ++round) {
      for (auto& one : cases_) measure(one);
    }
  }

  // Gives each rank's speed alone, relative to rank 0's.
  std::vector<double> speeds() const {
    std::vector<double> speeds;
    for (int r = 0; r < rank_.world_size(); ++r) {
      const double speed = alone(0) / alone(r);
      speeds.push_back(std::abs(speed - 1) < same_speed ? 1 : speed);
    }
    return speeds;
  }

  // Computes Cluster::contention.
  std::vector<double> contention() const {
    const auto speed = speeds();
    std::vector<double> slowdown{1};
    for (const auto& one : cases_) {
      if (one.end - one.begin == 1) continue;
      // This would be the slowest rank's time if the ranks did not slow each other down.
      const double longest = alone(0) / *std::min_element(speed.begin() + one.begin, speed.begin() + one.end);
      // Between measured numbers of ranks the slowdown is a straight line.
      const double before = slowdown.back(), here = std::max(before, one.seconds / longest);
      const auto known = static_cast<int>(slowdown.size());
      for (int n = known + 1; n <= one.end; ++n) {
        slowdown.push_back(before + (here - before) * (n - known) / (one.end - known));
      }
    }
    return slowdown;
  }

 private:
  // Describes a case in which ranks begin … end - 1 compute, and the others wait.
  struct Case {
    int begin, end;
    double seconds = std::numeric_limits<double>::infinity();  // seconds of a step, in the best round
  };

  double alone(int r) const { return cases_[static_cast<size_t>(r)].seconds; }

  // Measures one round. A step ends when the slowest rank has done its own, as in training, and the median counts. A
  // rank's own times would hide that ranks wait for each other: ranks that share cores take turns at being quick.
  void measure(Case& one) {
    const bool computes = one.begin <= rank_.index() && rank_.index() < one.end;
    std::vector<double> seconds(static_cast<size_t>(steps_));
    rank_.barrier();
    for (double& step : seconds) {
      const auto start = std::chrono::steady_clock::now();
      if (computes) meter_.step(samples_);
      rank_.barrier();
      step = seconds_since(start);
    }
    std::nth_element(seconds.begin(), seconds.begin() + steps_ / 2, seconds.end());
    one.seconds = std::min(one.seconds, seconds[static_cast<size_t>(steps_ / 2)]);
  }

  LayerMeter& meter_;
  Rank rank_;
  int64_t samples_ = 0;
  int64_t steps_ = 0;
  std::vector<Case> cases_;  // first come the cases of one rank alone
};

}  // namespace

ModelProfile profile(const Sequential& net, const Batch& sample, const Criterion& criterion, Rank& rank,
                     const ProfileOptions& options) {
  check(net, sample, options);
  const Batch here{sample.x.to(rank.device()), sample.y.to(rank.device()), sample.global_size};
  const Sequential copy = rank.in_turn([&] { return clone_of(net, rank.device()); });
  LayerMeter meter(copy, names_of(net), here, criterion);
  ModelProfile profile;
  if (rank.index() == 0) {
    profile.signature = model_signature(net);
    profile.input_bytes = static_cast<double>(here.x.nbytes()) / static_cast<double>(here.size());
    profile.layers = meter.measure(options.seconds);
    profile.update_seconds = update_seconds(copy);
    profile.sliced = slices_of(net, here, criterion, rank, options);
  }
  Load load(meter, rank, profile.layers, here.size());
  load.measure();
  profile.speeds = load.speeds();
  profile.contention = load.contention();
  if (rank.index() == 0) {
    profile.loss = std::move(profile.layers.back());
    profile.layers.pop_back();
  }
  return profile_from_json(shared_text(rank.index() == 0 ? to_json(profile) : "", rank));
}

}  // namespace lockstep
