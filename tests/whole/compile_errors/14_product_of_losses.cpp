// Says: add and scale Tensors within one criterion
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  const auto loss = net.loss(batch, F::cross_entropy);
  (loss * loss).backward();
}
