// Says: A criterion takes \(const torch::Tensor& y_hat, const torch::Tensor& y\)
#include <lockstep/fit.hpp>

#include "probe.hpp"

lockstep::Task mistake() {
  return {.module = [] { return std::make_shared<Net>(); },
          .criterion = [](Tensor& y_hat, Tensor& y) { return F::cross_entropy(y_hat, y); },
          .train = data};
}
