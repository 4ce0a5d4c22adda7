// Says: parts by in_parts\(k\) add up without a factor
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  auto half = net.loss(batch, F::cross_entropy) / 2;
  half.backward();
}
