#include <ATen/ops/tensor.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/balance.hpp>

#include "data_parallel/replica.hpp"
#include "lap_clock.hpp"
#include "ranks/gather.hpp"
#include "rebalance.hpp"

#include <bit>
#include <string>
#include <utility>

namespace lockstep {

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
  laps_->drop();  // it has waited for the others in here
  const std::vector<int64_t> next(here.const_data_ptr<int64_t>(), here.const_data_ptr<int64_t>() + here.numel());
  if (next == sizes) return false;
  shares_.assign(next.begin(), next.end());
  batches.set_shares(shares_);
  return true;
}

}  // namespace lockstep
