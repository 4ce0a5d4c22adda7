// Balance: parts of each batch in proportion to how fast the ranks' devices are, measured while they train.
//
//   lockstep::Balance balance(net, rank);  // net: a DataParallel
//   auto all = lockstep::batches(train_set, {.size = 256, .shares = balance.shares()}, rank);
//   for (auto& batch : all) {
//     sgd.zero_grad();
//     net.loss(batch, torch::nn::functional::cross_entropy).backward();
//     sgd.step();
//     balance.step(batch, all);
//   }
//
// Gradients stay those of the mean loss over the whole batch; their rounding follows the parts, and so the clock: two
// runs do not give the same bits. Used by its rank's thread only. Cost: two small
// collectives every few steps. Why it is as it is: docs/decisions/0015.
#pragma once

#include <lockstep/data_parallel/data_parallel.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

class LapClock;

struct BalanceOptions {
  int every = 10;  // steps between two looks; the slowest and the fastest lap between them do not count
  std::function<double()> clock = {};  // seconds on the CPU, of a simulated one; empty: the clock on the wall
};

// A rank's lap is what it computes between two waits for the others: from the moment when the gradients are averaged to
// the moment when its own part of the next backward is computed. Update, gathering the batch, forward, backward; on the
// CPU by the clock, on GPUs by events on the current stream. At every look the ranks tell each other their laps, and
// all take new parts at the same step if these promise a shorter one (how they are found, also where a step costs
// something whatever its size: src/data_parallel/rebalance.hpp). So a device that changes its speed during a run gets
// other parts some steps later.
class Balance {
 public:
  // Measures net's backwards from here on, until it is destroyed. Parts are near-equal ones, or those of the batches
  // that it is given, until the first look. All ranks make one, with equal options. Throws Error: every < 1, a net with
  // average = false, or one that has a Balance already.
  template <class Module>
  Balance(const DataParallel<Module>& net, Rank& rank, const BalanceOptions& options = {})
      : Balance(net.replica(), rank, options) {}
  Balance(std::shared_ptr<Replica> replica, Rank& rank, const BalanceOptions& options = {});
  ~Balance();
  Balance(const Balance&) = delete;
  Balance& operator=(const Balance&) = delete;

  // Ends a step: `batch` was this rank's part of it. Gives `batches` new shares if there are new parts, and says so.
  // Only laps of full batches, the largest so far, count. While a rank gets no samples of these it cannot be measured,
  // and parts stay as they are; otherwise each rank keeps one at least. All ranks must call it.
  bool step(const Batch& batch, Batches& batches);

  // What took time since the last step was none: an evaluation, a checkpoint.
  void leave_out();

  // For the next epoch's batches: each rank's samples of a full batch; empty before there are new parts.
  const std::vector<double>& shares() const { return shares_; }

 private:
  bool look(int64_t size, Batches& batches);

  const std::shared_ptr<Replica> replica_;
  Rank rank_;
  const BalanceOptions options_;
  const std::shared_ptr<LapClock> laps_;
  int64_t full_size_ = 0;
  int steps_ = 0;  // since the last look
  std::vector<double> shares_;
};

}  // namespace lockstep
