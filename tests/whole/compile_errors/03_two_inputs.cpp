// Says: for several inputs let it take \(const lockstep::Batch& batch\)
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(TwoInputs(), rank);
  net.loss(batch, F::cross_entropy).backward();
}
