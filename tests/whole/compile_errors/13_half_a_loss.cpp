// Says: Parts by in_parts\(\) need no factor
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  auto half = net.loss(batch, F::cross_entropy) / 2;
  half.backward();
}
