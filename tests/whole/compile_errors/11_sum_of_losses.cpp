// Says: add and scale Tensors within one criterion
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  auto loss = net.loss(batch, F::cross_entropy) + 0.5 * net.loss(batch, F::cross_entropy);
  loss.backward();
}
