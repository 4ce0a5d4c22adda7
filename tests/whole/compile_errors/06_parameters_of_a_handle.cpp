// Says: no member named .parameters.
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  torch::optim::SGD sgd(net.parameters(), 0.1);
}
