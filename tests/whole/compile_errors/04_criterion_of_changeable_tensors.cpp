// Says: A criterion takes \(const torch::Tensor& y_hat, const torch::Tensor& y\)
#include "probe.hpp"

void mistake(Rank& rank) {
  lockstep::DataParallel net(Net(), rank);
  net.loss(batch, [](Tensor& y_hat, Tensor& y) { return F::cross_entropy(y_hat, y); }).backward();
}
