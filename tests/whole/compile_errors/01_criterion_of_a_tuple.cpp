// Says: give loss\(\) a function of the batch
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(TwoOutputs(), rank);
  net.loss(batch, [](const std::tuple<Tensor, Tensor>& outputs,
                     const Tensor& y) { return F::cross_entropy(std::get<0>(outputs), y); })
      .backward();
}
