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
// Gradients stay those of the mean loss over the whole batch. Their rounding depends on the parts, and so on the clock:
// two runs do not give the same bits. Use a Balance from its rank's thread only. Cost: two small collectives every few
// steps. docs/decisions/0015 gives the reasons.
#pragma once

#include <lockstep/data_parallel/data_parallel.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

class LapClock;

struct BalanceOptions {
  int every = 10;                      // steps between two looks; each look ignores the slowest and the fastest lap
  std::function<double()> clock = {};  // a simulated clock for CPU ranks, in seconds; empty: the real one
};

// A lap is a rank's work between two waits for the others: update, gathering the batch, forward and backward. It lasts
// from the moment when gradients are averaged until this rank's own part of the next backward is computed. On the CPU a
// clock measures it, on GPUs events on the current stream do.
//
// At every look the ranks tell each other their laps. If other parts promise a shorter lap, all take them at the same
// step. (src/lab/rebalance.hpp says how parts are found, also where a step has a fixed cost.) So a device
// that changes its speed during a run gets other parts some steps later.
class Balance {
 public:
  // Measures net's backwards from here on, until it is destroyed. Until the first look the batches' own parts stay,
  // mostly near-equal ones. Make one on all ranks, with equal options. Throws Error if every < 1, if the net has
  // average = false, or if it has a Balance already.
  Balance(const Replicas& net, Rank& rank, const BalanceOptions& options = {});
  ~Balance();
  Balance& operator=(Balance&&) = delete;

  // Ends a step, of which `batch` was this rank's part. If there are new parts, step() gives `batches` their shares and
  // returns true. Only laps of full batches count; a batch is full if none was larger so far. A rank without samples of
  // a full batch cannot be measured; then parts stay as they are. Otherwise each rank keeps at least one sample. Call
  // it on all ranks.
  bool step(const Batch& batch, Batches& batches);

  // Leaves out the time since the last step, which was spent on something else: an evaluation, a checkpoint.
  void leave_out();

  // Gives each rank's samples, or grains, of a full batch, for the next epoch's batches. It is empty while there are no
  // new parts.
  const std::vector<double>& shares() const { return shares_; }

 private:
  bool look(int64_t size, Batches& batches);

  const std::shared_ptr<Replica> replica_;
  Rank rank_;
  const BalanceOptions options_;
  const std::shared_ptr<LapClock> laps_;
  int64_t full_size_ = 0;
  int steps_ = 0;  // steps since the last look
  std::vector<double> shares_;
};

}  // namespace lockstep
