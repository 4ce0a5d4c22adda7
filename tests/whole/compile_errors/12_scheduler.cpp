// Says: optimizer.scheduler<torch::optim::StepLR>\(30, 0.1\)
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  lockstep::Optimizer adam(net, torch::optim::AdamOptions(1e-3));
  torch::optim::StepLR rate(adam, 30, 0.1);
  rate.step();
}
