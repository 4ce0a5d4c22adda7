// Says: torch::save\(net.module\(\), file\)
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  torch::save(net, "net.pt");
}
