#include <ATen/ops/tensor.h>
#include <c10/core/Event.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/balance.hpp>

#include "data_parallel/replica.hpp"
#include "devices/device_streams.hpp"
#include "ranks/gather.hpp"
#include "rebalance.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

namespace lockstep {

// Measures how long a device computes between two points, without waiting for it. On the CPU it uses the clock on the
// wall: the device lacks the time in which another program has the core. On GPUs it uses events on the current stream,
// which take() reads. Use it from one thread.
class LapClock {
 public:
  // `clock` gives seconds of a simulated clock, for the CPU. Empty: the clock on the wall.
  LapClock(const c10::Device& device, std::function<double()> clock) : device_(device), clock_(std::move(clock)) {}

  void start() { start_ = now(); }
  void drop() { start_.reset(); }  // forgets the lap that began

  // Ends the lap; does nothing without a start.
  void stop() {
    if (start_) last_.emplace(std::move(*start_), now());
    start_.reset();
  }

  // Keeps the last lap that ended, if any; without keep() the next one replaces it.
  void keep() {
    if (last_) kept_.push_back(std::move(*last_));
    last_.reset();
  }

  // Gives the mean seconds of the kept laps, without the slowest and the fastest; 0 if there are none. Waits for the
  // device, and forgets these laps.
  double take() {
    std::vector<double> seconds;
    for (const auto& lap : kept_) seconds.push_back(seconds_of(lap));
    kept_.clear();
    if (seconds.empty()) return 0;
    std::sort(seconds.begin(), seconds.end());
    const std::ptrdiff_t left_out = seconds.size() < 3 ? 0 : 1;
    const auto first = seconds.begin() + left_out, last = seconds.end() - left_out;
    return std::accumulate(first, last, 0.0) / static_cast<double>(last - first);
  }

 private:
  struct Point {
    double seconds = 0;                    // the seconds, on the CPU
    std::optional<c10::Event> event = {};  // the event, on GPUs
  };
  using Lap = std::pair<Point, Point>;

  Point now() const {
    using std::chrono::steady_clock, std::chrono::duration;
    if (device_.is_cpu())
      return {.seconds = clock_ ? clock_() : duration<double>(steady_clock::now().time_since_epoch()).count()};
    Point point;
    point.event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // the event keeps its time
    point.event->record(current_stream(device_));
    return point;
  }

  static double seconds_of(const Lap& lap) {
    const auto& [start, end] = lap;
    if (!start.event) return end.seconds - start.seconds;
    end.event->synchronize();
    return start.event->elapsedTime(*end.event) / 1000;
  }

  const c10::Device device_;
  const std::function<double()> clock_;
  std::optional<Point> start_;
  std::optional<Lap> last_;
  std::vector<Lap> kept_;
};

Balance::Balance(const Replicas& net, Rank& rank, const BalanceOptions& options)
    : replica_(net.replica()),
      rank_(rank),
      options_(options),
      laps_(std::make_shared<LapClock>(rank.device(), options.clock)) {
  if (options_.every < 1) {
    throw Error("Balance: every is " + std::to_string(options_.every) +
                "; ranks compare their times every 1 or more steps");
  }
  replica_->backwards().watch([laps = laps_] { laps->stop(); }, [laps = laps_] { laps->start(); });
}

Balance::~Balance() {
  replica_->backwards().stop_watching();
}

void Balance::leave_out() {
  laps_->start();
}

bool Balance::step(const Batch& batch, Batches& batches) {
  if (rank_.world_size() == 1) return false;
  if (batch.global_size > full_size_) {  // laps of smaller ones do not count any more
    full_size_ = batch.global_size;
    steps_ = 0;
    laps_->take();
  }
  ++steps_;
  if (batch.global_size < full_size_) return false;
  laps_->keep();
  return steps_ >= options_.every && look(batch.grain > 0 ? batch.own_grains().size() : batch.size(), batches);
}

// Rank 0 decides for all: arithmetic on another machine might round otherwise.
bool Balance::look(int64_t size, Batches& batches) {
  steps_ = 0;
  const at::Tensor table = of_all_ranks(rank_, {bits_of(laps_->take()), size});
  std::vector<int64_t> sizes;
  std::vector<double> seconds;
  for (int64_t rank = 0; rank < table.size(0); ++rank) {
    seconds.push_back(std::bit_cast<double>(table[rank][0].item<int64_t>()));
    sizes.push_back(table[rank][1].item<int64_t>());
  }
  const at::Tensor agreed = at::tensor(rebalanced(sizes, seconds), at::kLong).to(rank_.device());
  rank_.broadcast(agreed);
  const at::Tensor here = agreed.cpu();
  laps_->drop();  // this lap has a wait for the others
  const std::vector<int64_t> next(here.const_data_ptr<int64_t>(), here.const_data_ptr<int64_t>() + here.numel());
  if (next == sizes) return false;
  shares_.assign(next.begin(), next.end());
  batches.set_shares(shares_);
  return true;
}

}  // namespace lockstep
