// Says: forward gives one Tensor.*give loss\(\) a function of the batch
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(TwoOutputs(), rank);
  net.loss(batch, F::cross_entropy).backward();
}
